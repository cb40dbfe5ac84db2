"""The buffer of finished groups between rollout and learner, the filter of its groups, and the rounds that fill it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from envgym.episodes.scores import is_flat
from envgym.errors import RunError
from envgym.tasks.task_set import TaskCursor
from envgym.types import Episode, Group, Task

from .config import FilterConfig, RolloutConfig

MAX_ROUNDS = 4
"""Maximum rollout rounds per training step without a filter. Rounds after the first replace incomplete groups."""


class Buffer:
    """Accepts groups, returns them in order, and never loses a group that it accepted.

    Failed members without a reward are removed from their group. A group is dropped and counted if fewer than
    `min_group_size` members remain that have a reward, or if `filter` drops it (counts by reason in `filtered`); the
    trainer rolls out another task instead.
    """

    def __init__(self, min_group_size: int, *, needs_reward: bool, filter: FilterConfig | None = None) -> None:
        self._min_group_size = min_group_size
        self.needs_reward = needs_reward
        self._filter = filter or FilterConfig()
        self._groups: list[Group] = []
        self.failures: Counter[str] = Counter()
        self.n_retried = 0
        self.refills = 0
        self.dropped_groups = 0
        self.filtered: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> Sequence[Group]:
        """The groups that wait."""
        return self._groups

    def add(self, groups: Sequence[Group]) -> int:
        """Add the groups that can be trained on. Returns their number."""
        previous_size = len(self._groups)
        for group in groups:
            self.failures.update([e.outcome.reason for e in [*group.episodes, *group.superseded] if e.failed])
            self.n_retried += len(group.superseded)
            self.refills += group.refills
            members = [e for e in group.episodes if e.is_counted and (e.reward is not None or not self.needs_reward)]
            if len(members) < self._min_group_size:
                self.dropped_groups += 1
            elif reason := drop_reason(self._filter, members):
                self.filtered[reason] += 1
            else:
                self._groups.append(Group(group.id, group.task, members))
        return len(self._groups) - previous_size

    def take(self, count: int) -> list[Group]:
        """Remove and return the `count` oldest groups."""
        groups, self._groups = self._groups[:count], self._groups[count:]
        return groups

    def take_oldest(self, count: int) -> list[Group]:
        """Like `take`, in start order (sorted by group id) rather than completion order."""
        self._groups.sort(key=lambda group: group.id)
        return self.take(count)

    def state(self) -> dict[str, Any]:
        return {
            "groups": list(self._groups),
            "failures": dict(self.failures),
            "played_again": self.n_retried,
            "refills": self.refills,
            "dropped_groups": self.dropped_groups,
            "filtered": dict(self.filtered),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._groups = state["groups"]
        self.failures = Counter(state["failures"])
        self.n_retried = state["played_again"]
        self.refills = state["refills"]
        self.dropped_groups = state["dropped_groups"]
        self.filtered = Counter(state["filtered"])


def can_drop(config: FilterConfig) -> bool:
    """True if the filter drops some groups."""
    return config.zero_variance or config.min_score is not None or config.max_score is not None


def drop_reason(config: FilterConfig, members: Sequence[Episode]) -> str:
    """The reason to drop a group of finished episodes, in one word; empty if the group stays.

    Source: Q. Yu et al., "DAPO" (2025), section 3.2, which keeps 0 < accuracy < 1. If a member has no score,
    `zero_variance` compares rewards. Raises `RunError` for a score range if no member has a score.
    """
    scores = [episode.score for episode in members if episode.score is not None]
    if config.zero_variance and is_flat(members):
        return "zero_variance"
    low, high = config.min_score, config.max_score
    if low is None and high is None:
        return ""
    if not scores:
        raise RunError(
            "rollout.filter.min_score and max_score need scores, and the environment gives none (its rewards are not "
            'all in [0, 1]): let it give info["score"], or use rollout.filter.zero_variance alone'
        )
    mean = fmean(scores)
    is_outside = (low is not None and mean <= low) or (high is not None and mean >= high)
    return "score_range" if is_outside else ""


@dataclass(slots=True)
class RolloutBatch:
    """All groups rolled out for a training step, dropped ones included, and the number of rounds."""

    groups: list[Group] = field(default_factory=list)
    n_buffered: int = 0
    """Number of groups that the buffer accepted."""
    rounds: int = 0

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group.episodes]

    def metrics(self) -> dict[str, float]:
        """The metrics of `rollout.filter`."""
        return {"filter/kept_share": self.n_buffered / len(self.groups), "filter/rounds": self.rounds}

    def explain_no_groups(self, config: RolloutConfig) -> str:
        """The error message for a step without any group."""
        if can_drop(config.filter) and any(episode.reward is not None for episode in self.episodes):
            return (
                f"rollout.filter dropped all {len(self.groups)} groups of {self.rounds} rounds: the tasks are "
                "all too hard for the policy, or all solved"
            )
        if all(not episode.is_counted or episode.reward is None for episode in self.episodes):
            return "no episode has a reward: the environment gave none, so there is nothing to train on (see rollouts/)"
        return "no group of episodes is complete enough to train on (see rollouts/)"


async def fill_buffer(
    buffer: Buffer,
    cursor: TaskCursor,
    config: RolloutConfig,
    roll_out: Callable[[Sequence[Task], int], Awaitable[list[Group]]],
) -> RolloutBatch:
    """Roll out tasks until `buffer` holds `config.tasks_per_step` groups or the rounds of a step are used up. Stops
    early if no episode of the step was usable (every one failed, or lacks a required reward), or more than
    `config.max_failed_share` of them failed.

    `roll_out` takes the tasks of a round and the round's number. If a filter drops groups, later rounds are larger by
    the share that it has dropped so far: otherwise a step would need ever smaller rounds. Surplus groups stay in the
    buffer for the next step.
    """
    batch = RolloutBatch()
    max_rounds = config.filter.max_rounds if can_drop(config.filter) else MAX_ROUNDS
    while (missing := config.tasks_per_step - len(buffer)) > 0 and batch.rounds < max_rounds:
        count = missing
        if can_drop(config.filter) and batch.groups:
            count = min(config.tasks_per_step, math.ceil(missing * len(batch.groups) / max(1, batch.n_buffered)))
        groups = await roll_out(await cursor.next(count), batch.rounds)
        cursor.observe(groups)
        batch.n_buffered += buffer.add(groups)
        batch.groups += groups
        batch.rounds += 1
        finished = [e for e in batch.episodes if e.is_counted]
        is_usable = any(e.reward is not None or not buffer.needs_reward for e in finished)
        if not is_usable or len(batch.episodes) - len(finished) > config.max_failed_share * len(batch.episodes):
            break  # more rounds would not help; the caller raises the error
    return batch
