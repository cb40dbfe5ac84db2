"""Branches: episodes that continue others from one of their turns (`rollout.branches`).

A branch repeats the recorded turns of its parent: its sampler answers them with the parent's tokens, and its
environment stands where the parent's stood, since it is a copy of that (`Env.fork`), or another instance that got the
same seed and actions. So agents run as usual, and every observation is compared with the record: by the tokens that the
agent makes of it, which must be the parent's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from envgym.engine import Generation
from envgym.env import CheckedEnv, Info
from envgym.errors import InvalidOutcome
from envgym.processes.cancellation import UsersCode
from envgym.transcript import EpisodeSampler
from envgym.types import Action, Episode, Observation, PlacedImage, Segment, Turn, turn_node

if TYPE_CHECKING:
    from .config import BranchRule

NOT_REPEATED = "not_repeated"
"""The kind of failure of a branch whose environment differs from the parent's with the same actions."""
RecordedTurn = tuple["array[int]", Segment, Turn]
"""The context [T] that a turn was sampled after, its tokens, and its end."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The place where an episode leaves another: after the first `turn` turns of `parent`, which has more."""

    parent: Episode
    turn: int

    def recorded_turns(self) -> list[RecordedTurn]:
        """The turns that are repeated, and the parent's next one."""
        turns = zip(turns_of(self.parent), range(self.turn + 1), strict=False)
        return [turn for turn, _ in turns]


def turns_of(episode: Episode) -> Iterator[RecordedTurn]:
    """The turns of an episode in the order of its rows."""
    for row in episode.rows:
        context, ends = array("i"), iter(row.turns)
        for segment in row.segments:
            if segment.role == "action":
                yield context[:], segment, next(ends)
            context.extend(segment.token_ids)


# -- choosing turns -------------------------------------------------------------------------------------------


def rounds(rule: BranchRule, count: int) -> list[tuple[BranchRule, range]]:
    """The rounds in which a group's branches start, each with the numbers of its branches. Returns spread only once
    some turns have several continuations, so that rule starts the first half evenly."""
    if rule != "spread" or count < 2:
        return [("evenly" if rule == "spread" else rule, range(count))] if count else []
    middle = (count + 1) // 2
    return [("evenly", range(middle)), (rule, range(middle, count))]


def choose_branches(episodes: Sequence[Episode], rule: BranchRule, count: int) -> list[Branch]:
    """The places of `count` branches of a group's episodes, by their records alone: fewer only if no episode has two
    turns. Every place is chosen before one is chosen again.

    `evenly`: one parent after the other, at equal distances; `entropy`: where the first token of the parent's next
    turn has the largest -log p, whose mean over samples is the entropy; `spread`: where the returns of the episodes
    with these turns have the largest standard deviation.
    """
    parents = [episode for episode in episodes if not episode.failed and _n_turns(episode) > 1]
    if not parents:
        return []
    if rule == "evenly":
        return _evenly(parents, count)
    places: dict[tuple[str, int], Branch] = {}
    for parent in parents:
        for turn in range(1, _n_turns(parent)):
            places.setdefault(turn_node(parent, turn - 1, {e.id: e for e in episodes}), Branch(parent, turn))
    values = {"entropy": _surprises, "spread": _spreads}[rule](places, episodes)
    order = sorted(places, key=lambda node: -values[node])  # stable: equal values stay in the order of members
    return [places[order[number % len(order)]] for number in range(count)]


def _n_turns(episode: Episode) -> int:
    """The turns of an episode whose record has their tokens; else 0."""
    is_whole = all(len(row.turns) == len(row.turn_ends) for row in episode.rows)
    return sum(len(row.turns) for row in episode.rows) if is_whole else 0


def _evenly(parents: Sequence[Episode], count: int) -> list[Branch]:
    branches = []
    for number in range(count):
        index, parent = number // len(parents), parents[number % len(parents)]
        n_branches = len(range(number % len(parents), count, len(parents)))
        n_turns = _n_turns(parent)
        branches.append(Branch(parent, min(n_turns - 1, max(1, round((index + 1) * n_turns / (n_branches + 1))))))
    return branches


def _surprises(places: Mapping[tuple[str, int], Branch], episodes: Sequence[Episode]) -> dict[tuple[str, int], float]:
    values = {}
    for node, branch in places.items():
        logprobs = branch.recorded_turns()[-1][1].logprobs
        values[node] = -logprobs[0] if logprobs else 0.0
    return values


def _spreads(places: Mapping[tuple[str, int], Branch], episodes: Sequence[Episode]) -> dict[tuple[str, int], float]:
    by_id = {episode.id: episode for episode in episodes}
    returns: dict[tuple[str, int], list[float]] = {node: [] for node in places}
    for episode in episodes:
        for turn in range(_n_turns(episode)) if episode.reward is not None else ():
            if (node := turn_node(episode, turn, by_id)) in returns:
                returns[node].append(episode.reward or 0.0)
    return {node: pstdev(values) if values else 0.0 for node, values in returns.items()}


# -- repeating turns ------------------------------------------------------------------------------------------


def not_repeated(turn: int, difference: str) -> InvalidOutcome:
    """The error of a branch whose environment differs from its parent's after `turn` turns."""
    place = f"after turn {turn}" if turn else "at the start"
    return InvalidOutcome("not_repeated", f"{place} {difference} with the same seed and actions")


@dataclass(slots=True)
class BranchSampler(EpisodeSampler):
    """The sampler of a branch: the first turns are its parent's. Raises `InvalidOutcome` if their contexts differ."""

    branch: Branch | None = None
    _turns: list[RecordedTurn] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert self.branch is not None, "the sampler of a branch"
        self._turns = self.branch.recorded_turns()

    async def generate(
        self, token_ids: Sequence[int], overrides: Mapping[str, Any] | None = None, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        turn, n_repeated = self.turn, len(self._turns) - 1
        if turn > n_repeated:
            return await EpisodeSampler.generate(self, token_ids, overrides, images)
        context, segment, end = self._turns[turn]
        if array("i", token_ids) != context:
            raise not_repeated(turn, "it observes something else")
        if turn == n_repeated:
            return await EpisodeSampler.generate(self, token_ids, overrides, images)
        sampling = await self._reserve(overrides)
        self._release(sampling.max_tokens, len(segment))
        assert segment.logprobs is not None, "a sampled turn has log-probabilities"
        return Generation(segment.token_ids, segment.logprobs, end.stop_reason, segment.versions)


class EnvAround(CheckedEnv):
    """Passes the calls of an agent on to an instance."""

    def __init__(self, env: CheckedEnv) -> None:
        self.env: CheckedEnv = env

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped


StepAnswer = tuple[Observation, float | None, bool, bool, Info]


class ForkedEnv(EnvAround):
    """Records what an instance answers, and a copy of it at each turn after the first."""

    def __init__(self, env: CheckedEnv) -> None:
        super().__init__(env)
        self.opening: tuple[Observation, Info] = Observation(), {}
        self.answers: list[StepAnswer] = []
        self.forks: list[CheckedEnv] = []

    async def reset(self, **options: Any) -> tuple[Observation, Info]:
        self.opening = await self.env.reset(**options)
        return self.opening

    async def step(self, action: Action | str) -> StepAnswer:
        answer = await self.env.step(action)
        self.answers.append(answer)
        if not (answer[2] or answer[3]):
            self.forks.append(self.env.fork())
        return answer


class RepeatedEnv(EnvAround):
    """The instance of a branch: it must give the rewards of its parent's turns, and not end with them. `record` has the
    answers to these if the instance is a fork, which has had them."""

    def __init__(self, env: CheckedEnv, branch: Branch, record: ForkedEnv | None) -> None:
        super().__init__(env)
        self._gives_rewards = not env.spec.scores_groups  # else the recorded rewards are not those of the steps
        self._rewards = [turn.reward for _, _, turn in branch.recorded_turns()[:-1]]
        self._record, self._n_steps = record, 0

    async def reset(self, **options: Any) -> tuple[Observation, Info]:
        return await self.env.reset(**options) if self._record is None else self._record.opening

    async def step(self, action: Action | str) -> StepAnswer:
        turn, self._n_steps = self._n_steps, self._n_steps + 1
        if turn >= len(self._rewards):
            return await self.env.step(action)
        answer = await self.env.step(action) if self._record is None else self._record.answers[turn]
        _, reward, terminated, truncated, _ = answer
        if terminated or truncated:
            raise not_repeated(turn + 1, "it ends")
        if self._gives_rewards and reward != self._rewards[turn]:
            raise not_repeated(turn + 1, f"it gives the reward {reward}, not {self._rewards[turn]},")
        return answer


class Forks:
    """Copies of environments at the turns of episodes, by their groups and ids, until the groups have ended."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, ForkedEnv]] = {}

    def record(self, env: CheckedEnv, group_id: str, episode_id: str) -> CheckedEnv:
        """The instance with copies at the turns of this episode, if its author wrote a `fork`."""
        if not env.can_fork:
            return env
        forked = self._groups.setdefault(group_id, {})[episode_id] = ForkedEnv(env)
        return forked

    def find(self, group_id: str, branch: Branch) -> ForkedEnv | None:
        """The record of a branch's parent, if it has a copy at its turn."""
        record = self._groups.get(group_id, {}).get(branch.parent.id)
        return record if record is not None and len(record.forks) >= branch.turn else None

    async def end_group(self, group_id: str) -> None:
        """Close the copies of a group's environments."""
        for record in self._groups.pop(group_id, {}).values():
            for fork in record.forks:
                with UsersCode():  # as at the end of an episode
                    await fork.close()
