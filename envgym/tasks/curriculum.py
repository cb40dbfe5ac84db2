"""Curriculum: tasks that are always or never solved give no gradient, and are drawn less often."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from envgym.episodes.scores import is_flat
from envgym.hashing import derived_seed
from envgym.settings import Settings
from envgym.types import Group, Task

REMEMBERED = 1_000_000
"""Maximum number of tasks whose last group is stored. The oldest are dropped: an endless set never repeats one."""


class CurriculumConfig(Settings):
    """Tasks that are always or never solved are drawn less often: they give no gradient."""

    skip: float = Field(0.0, ge=0, lt=1)
    """Fraction of the draws in which a task is skipped if its last group had equal scores; 0: never."""
    memory: int = Field(32, ge=1)
    """Number of last groups of the same difficulty that count for a task without a group of its own."""


class Curriculum:
    """Decides which tasks are skipped, by the scores of their earlier groups.

    A group is flat if its episodes all have the same score, or the same reward if some have no score. A task whose last
    group was flat is skipped in a fraction `skip` of its draws. A task without a group is skipped in `skip` times the
    fraction of flat groups among the last `memory` groups of its difficulty.

    Skips are spread evenly instead of drawn: each draw adds the task's probability of use to its credit, and the task
    is used when the credit has reached 1. So it is used at least every 1 / (1 - skip) draws, rounded up, and there is
    no random generator whose state a checkpoint would need.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        self._skip = config.skip
        self._memory = config.memory
        self._seed = seed
        self._flat: OrderedDict[str, bool] = OrderedDict()
        self._by_difficulty: dict[str, list[bool]] = {}
        self._credit: OrderedDict[str, float] = OrderedDict()
        self._draws = self._skips = self._groups = self._solved = self._unsolved = 0

    def is_skipped(self, task: Task) -> bool:
        """True if this draw of `task` is to be skipped."""
        self._draws += 1
        fraction = self._flat_fraction(task)
        if not fraction:
            return False
        credit = self._credit.pop(task.key, None)
        if credit is None:  # different starts, or all tasks would come back in the same step
            credit = derived_seed(self._seed, "curriculum", task.key) / 2**31
        credit += 1 - self._skip * fraction
        self._skips += credit < 1
        self._credit[task.key] = credit % 1
        if len(self._credit) > REMEMBERED:
            self._credit.popitem(last=False)
        return credit < 1

    def observe(self, groups: Sequence[Group]) -> None:
        """Record finished groups. Groups with fewer than two scores or rewards are ignored."""
        for group in groups:
            members = [e for e in group.episodes if e.is_counted and (e.score, e.reward) != (None, None)]
            if len(members) < 2:
                continue
            flat, score = is_flat(members), members[0].score
            self._groups += 1
            self._solved += flat and score is not None and score >= 0.5
            self._unsolved += flat and score is not None and score < 0.5
            self._record(group.task, flat)

    def metrics(self) -> dict[str, float]:
        """The fraction of draws that were skipped since the last call, and the fractions of flat groups."""
        metrics = {"curriculum/skipped_share": self._skips / self._draws} if self._draws else {}
        if self._groups:
            metrics["curriculum/solved_share"] = self._solved / self._groups
            metrics["curriculum/unsolved_share"] = self._unsolved / self._groups
        self._draws = self._skips = self._groups = self._solved = self._unsolved = 0
        return metrics

    def _flat_fraction(self, task: Task) -> float:
        """1 or 0 for the task's last group, else the fraction of flat groups of its difficulty."""
        if task.key in self._flat:
            return float(self._flat[task.key])
        last = self._by_difficulty.get(_difficulty(task))
        return sum(last) / len(last) if last else 0.0

    def _record(self, task: Task, flat: bool) -> None:
        self._flat[task.key] = flat
        self._flat.move_to_end(task.key)
        if len(self._flat) > REMEMBERED:
            self._flat.popitem(last=False)
        if not flat:
            self._credit.pop(task.key, None)
        if task.difficulty is not None:
            last = self._by_difficulty.setdefault(_difficulty(task), [])
            last.append(flat)
            del last[: -self._memory]

    def state(self) -> dict[str, Any]:
        return {
            "flat": dict(self._flat),
            "by_difficulty": {name: list(last) for name, last in self._by_difficulty.items()},
            "credit": dict(self._credit),
            "counts": [self._draws, self._skips, self._groups, self._solved, self._unsolved],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._flat = OrderedDict(state["flat"])
        self._by_difficulty = {name: list(last) for name, last in state["by_difficulty"].items()}
        self._credit = OrderedDict(state["credit"])
        self._draws, self._skips, self._groups, self._solved, self._unsolved = state["counts"]


def _difficulty(task: Task) -> str:
    """The key of equally difficult tasks: the environment, and two digits of the difficulty."""
    return "" if task.difficulty is None else f"{task.env} {task.difficulty:.2g}"
