"""Difficulty: tasks that are always or never solved teach nothing, and are drawn less often."""

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
"""Tasks whose last group is known. Those of an endless set never come back; the oldest are forgotten."""


class CurriculumConfig(Settings):
    """Tasks that are always or never solved are drawn less: they teach nothing."""

    skip: float = Field(0.0, ge=0, lt=1)
    """Share of the times that a task is passed over whose last group had one score throughout; 0: never."""
    memory: int = Field(32, ge=1)
    """Groups by which a difficulty is judged, for tasks that have not been played yet."""


class Curriculum:
    """Decides which tasks are passed over, from how their groups came out.

    A group is flat where its episodes all have one score, or one reward where not all have a score. A task whose last
    group was flat is passed over `skip` of the times it comes up. A task that has not been played yet goes by those of
    its difficulty: it is passed over `skip` times the share of flat ones among their last `memory` groups.

    Passing over is spread evenly instead of drawn: each time a task comes up it gains its chance of being played,
    and is played when these have reached 1. So it is played at least every 1 / (1 - skip) times that it comes up,
    rounded up, and there is no random generator whose state a checkpoint would need.
    """

    def __init__(self, config: CurriculumConfig, seed: int) -> None:
        self._skip = config.skip
        self._memory = config.memory
        self._seed = seed
        self._flat: OrderedDict[str, bool] = OrderedDict()
        self._by_difficulty: dict[str, list[bool]] = {}
        self._credit: OrderedDict[str, float] = OrderedDict()
        self._came = self._passed = self._groups = self._solved = self._unsolved = 0

    def passes_over(self, task: Task) -> bool:
        self._came += 1
        share = self._flat_share(task)
        if not share:
            return False
        credit = self._credit.pop(task.key, None)
        if credit is None:  # each begins elsewhere, or they would all come back at once
            credit = derived_seed(self._seed, "curriculum", task.key) / 2**31
        credit += 1 - self._skip * share
        self._passed += credit < 1
        self._credit[task.key] = credit % 1
        if len(self._credit) > REMEMBERED:
            self._credit.popitem(last=False)
        return credit < 1

    def observe(self, groups: Sequence[Group]) -> None:
        """Take note of groups that were played. Those with fewer than two scores or rewards say nothing."""
        for group in groups:
            members = [e for e in group.episodes if not e.failed and (e.score, e.reward) != (None, None)]
            if len(members) < 2:
                continue
            flat, score = is_flat(members), members[0].score
            self._groups += 1
            self._solved += flat and score is not None and score >= 0.5
            self._unsolved += flat and score is not None and score < 0.5
            self._note(group.task, flat)

    def metrics(self) -> dict[str, float]:
        """Of the tasks that came up since the last call, the share passed over; of the groups, those flat."""
        metrics = {"curriculum/skipped_share": self._passed / self._came} if self._came else {}
        if self._groups:
            metrics["curriculum/solved_share"] = self._solved / self._groups
            metrics["curriculum/unsolved_share"] = self._unsolved / self._groups
        self._came = self._passed = self._groups = self._solved = self._unsolved = 0
        return metrics

    def _flat_share(self, task: Task) -> float:
        """The share of flat groups in what is known of the task, or else of its difficulty."""
        if task.key in self._flat:
            return float(self._flat[task.key])
        last = self._by_difficulty.get(_difficulty(task))
        return sum(last) / len(last) if last else 0.0

    def _note(self, task: Task, flat: bool) -> None:
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
            "counts": [self._came, self._passed, self._groups, self._solved, self._unsolved],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._flat = OrderedDict(state["flat"])
        self._by_difficulty = {name: list(last) for name, last in state["by_difficulty"].items()}
        self._credit = OrderedDict(state["credit"])
        self._came, self._passed, self._groups, self._solved, self._unsolved = state["counts"]


def _difficulty(task: Task) -> str:
    """The name of the tasks that count as equally difficult: two digits of it, in one environment."""
    return "" if task.difficulty is None else f"{task.env} {task.difficulty:.2g}"
