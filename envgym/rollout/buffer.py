"""The buffer: finished groups on their way from the rollout to the learner, and playing tasks until it has enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Task

from .config import RolloutConfig
from .filter import FilterConfig, drop_reason

MAX_ROUNDS = 4
"""Times a step plays tasks without a filter: once, and again where too many groups fell short of members."""


class Buffer:
    """Accepts groups, hands them out in order, and never loses one it has accepted.

    Failed members are taken out of their group; a group left with fewer than `min_group_size` members that
    have a reward is dropped and counted, and the trainer rolls another task out in its place. So is one that `filter`
    drops: its counts are in `filtered`, by reason.
    """

    def __init__(self, min_group_size: int, *, needs_reward: bool, filter: FilterConfig | None = None) -> None:
        self._min_group_size = min_group_size
        self.needs_reward = needs_reward
        self._filter = filter or FilterConfig()
        self._groups: list[Group] = []
        self.failures: Counter[str] = Counter()
        self.played_again = 0
        self.refills = 0
        self.dropped_groups = 0
        self.filtered: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> int:
        """Take in the groups that can be learned from; returns how many those are."""
        before = len(self._groups)
        for group in groups:
            self.failures.update(e.outcome.reason for e in [*group.episodes, *group.superseded] if e.failed)
            self.played_again += len(group.superseded)
            self.refills += group.refills
            members = [e for e in group.episodes if not e.failed and (e.reward is not None or not self.needs_reward)]
            if len(members) < self._min_group_size:
                self.dropped_groups += 1
            elif reason := drop_reason(self._filter, members):
                self.filtered[reason] += 1
            else:
                self._groups.append(Group(group.id, group.task, members))
        return len(self._groups) - before

    def take(self, count: int) -> list[Group]:
        """Remove and return the `count` oldest groups."""
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

    def take_oldest(self, count: int) -> list[Group]:
        """`take` of groups that came in another order than they were begun, which their names tell."""
        self._groups.sort(key=lambda group: group.id)
        return self.take(count)

    def state(self) -> dict[str, Any]:
        return {
            "groups": list(self._groups),
            "failures": dict(self.failures),
            "played_again": self.played_again,
            "refills": self.refills,
            "dropped_groups": self.dropped_groups,
            "filtered": dict(self.filtered),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._groups = state["groups"]
        self.failures = Counter(state["failures"])
        self.played_again = state["played_again"]
        self.refills = state["refills"]
        self.dropped_groups = state["dropped_groups"]
        self.filtered = Counter(state["filtered"])


@dataclass(slots=True)
class RolloutBatch:
    """The groups that were played for a step, of which the buffer kept some, and the rounds that it took."""

    played: list[Group] = field(default_factory=list)
    kept: int = 0
    rounds: int = 0

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.played for episode in group.episodes]

    def metrics(self) -> dict[str, float]:
        """Metrics of a filter."""
        return {"filter/kept_share": self.kept / len(self.played), "filter/rounds": self.rounds}

    def why_nothing_was_kept(self, config: RolloutConfig) -> str:
        """The reason that a step has no group at all, for people."""
        if config.filter.on and any(episode.reward is not None for episode in self.episodes):
            return (
                f"rollout.filter kept none of the {len(self.played)} groups of {self.rounds} rounds: the tasks are "
                "all too hard for the policy, or all solved"
            )
        if all(episode.failed or episode.reward is None for episode in self.episodes):
            return (
                "no episode has a reward: the environment gave none, and there is nothing to learn from (see rollouts/)"
            )
        return "no group of episodes is complete enough to learn from (see rollouts/)"


async def fill(
    buffer: Buffer,
    cursor: TaskCursor,
    config: RolloutConfig,
    play: Callable[[Sequence[Task], int], Awaitable[list[Group]]],
) -> RolloutBatch:
    """Play tasks until `buffer` holds `config.tasks` groups, the rounds that a step may have are over, or a first round
    in which every episode failed, or has no reward where there must be one.

    `play` is given the tasks of a round and its number. Where a filter drops groups, later rounds ask for as many more
    as this step's own losses make likely, so that a step is not spent on ever smaller rounds; what is then
    accepted beyond the step's need stays in the buffer for the next one.
    """
    batch = RolloutBatch()
    max_rounds = config.filter.max_rounds if config.filter.on else MAX_ROUNDS
    while (missing := config.tasks - len(buffer)) > 0 and batch.rounds < max_rounds:
        count = missing
        if config.filter.on and batch.played:
            count = min(config.tasks, math.ceil(missing * len(batch.played) / max(1, batch.kept)))
        groups = await play(await cursor.next(count), batch.rounds)
        cursor.observe(groups)
        batch.kept += buffer.add(groups)
        batch.played += groups
        batch.rounds += 1
        if all(episode.failed or (buffer.needs_reward and episode.reward is None) for episode in batch.episodes):
            break  # what goes wrong every time does not mend itself: the caller says what it was
    return batch
