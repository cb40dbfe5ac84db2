"""The order of tasks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

from envgym.env import TaskSet
from envgym.errors import RunError
from envgym.hashing import derived_seed
from envgym.types import Group, Task

from .curriculum import Curriculum


async def tasks_at(tasks: TaskSet, places: Iterable[int]) -> list[Task]:
    """The tasks at these places. After each, whatever else waits has its turn, such as a signal that asks to stop."""
    drawn = []
    for place in places:
        drawn.append(await tasks.get(place))
        await asyncio.sleep(0)
    return drawn


class TaskCursor:
    """Goes through a task set: a finite one in a new order each epoch, none twice within it.

    With a `curriculum`, which learns from the groups that come back, some tasks are passed over.
    """

    def __init__(self, tasks: TaskSet, seed: int, curriculum: Curriculum | None = None) -> None:
        self._tasks = tasks.with_seed(seed)
        self._seed = seed
        self._curriculum = curriculum
        self._position = 0
        self._order: list[int] = []
        self._epoch = -1
        if tasks.size == 0:
            raise RunError("the environment has no training tasks")

    async def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        taken: list[Task] = []
        while len(taken) < count:
            [task] = await tasks_at(self._tasks, [self._index()])
            if self._curriculum is None or not self._curriculum.passes_over(task):
                taken.append(task)
        return taken

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from groups that were played. Metrics of the curriculum tell of what came since they were asked for."""
        if self._curriculum is not None:
            self._curriculum.observe(groups)

    def metrics(self) -> dict[str, float]:
        return {} if self._curriculum is None else self._curriculum.metrics()

    def _index(self) -> int:
        position, self._position = self._position, self._position + 1
        size = self._tasks.size
        if size is None:
            return position
        epoch, place = divmod(position, size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(size))
            random.Random(derived_seed(self._seed, "task order", epoch)).shuffle(self._order)
        return self._order[place]

    def state(self) -> dict[str, Any]:
        """Its position, as values that later calls do not change."""
        return {
            "position": self._position,
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        if self._curriculum is not None and state.get("curriculum") is not None:
            self._curriculum.load_state(state["curriculum"])
