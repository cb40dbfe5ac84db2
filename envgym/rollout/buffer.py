"""The buffer: finished groups on their way from the rollout to the learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from envgym.config.schema import FilterConfig
from envgym.errors import RunError
from envgym.types import Episode, Group

from .scores import is_flat


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
            self.failures.update(e.outcome.reason for e in [*group.episodes, *group.lost] if e.failed)
            self.played_again += len(group.lost)
            self.refills += group.refills
            members = [e for e in group.episodes if not e.failed and (e.reward is not None or not self.needs_reward)]
            if len(members) < self._min_group_size:
                self.dropped_groups += 1
            elif reason := filtered_by(self._filter, members):
                self.filtered[reason] += 1
            else:
                self._groups.append(Group(group.id, group.task, members))
        return len(self._groups) - before

    def take(self, count: int) -> list[Group]:
        """Remove and return the `count` oldest groups."""
        taken, self._groups = self._groups[:count], self._groups[count:]
        return taken

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


def filtered_by(config: FilterConfig, members: Sequence[Episode]) -> str:
    """Why a group of finished episodes is not learned from, in one word; empty where it is.

    Source: Q. Yu et al., "DAPO" (2025), section 3.2, which keeps 0 < accuracy < 1. Rewards stand in for scores where
    a member has none; where all have none, a range of scores cannot be asked for (`RunError`).
    """
    scores = [episode.score for episode in members if episode.score is not None]
    if config.zero_variance and is_flat(members):
        return "zero_variance"
    low, high = config.min_score, config.max_score
    if low is None and high is None:
        return ""
    if not scores:
        raise RunError(
            "rollout.filter.min_score and max_score go by scores, and the environment gives none (its rewards are not "
            'all in [0, 1]): let it give info["score"], or use rollout.filter.zero_variance alone'
        )
    mean = fmean(scores)
    outside = (low is not None and mean <= low) or (high is not None and mean >= high)
    return "score_range" if outside else ""
