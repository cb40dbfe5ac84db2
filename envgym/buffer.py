"""The buffer: finished groups on their way from the rollout to the learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .types import Group


class Buffer:
    """Accepts groups, hands them out in order, and never loses one it has accepted.

    Failed members are taken out of their group; a group left with fewer than `min_group_size` members that
    have a reward is dropped and counted, and the trainer rolls another task out in its place.
    """

    def __init__(self, min_group_size: int, *, needs_reward: bool) -> None:
        self._min_group_size = min_group_size
        self._needs_reward = needs_reward
        self._groups: list[Group] = []
        self.failures: Counter[str] = Counter()
        self.played_again = 0
        self.refills = 0
        self.dropped_groups = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.failures.update(e.outcome.reason for e in [*group.episodes, *group.lost] if e.failed)
            self.played_again += len(group.lost)
            self.refills += group.refills
            members = [e for e in group.episodes if not e.failed and (e.reward is not None or not self._needs_reward)]
            if len(members) >= self._min_group_size:
                self._groups.append(Group(group.id, group.task, members))
            else:
                self.dropped_groups += 1

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
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._groups = state["groups"]
        self.failures = Counter(state["failures"])
        self.played_again = state["played_again"]
        self.refills = state["refills"]
        self.dropped_groups = state["dropped_groups"]
