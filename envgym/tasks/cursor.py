"""The order of tasks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

from envgym.errors import RunError
from envgym.hashing import derived_seed
from envgym.types import Group, Task

from .curriculum import Curriculum
from .task_set import TaskSet


async def tasks_at(tasks: TaskSet, indices: Iterable[int]) -> list[Task]:
    """The tasks at these indices. Yields to the event loop after each, for example to a signal handler."""
    drawn = []
    for index in indices:
        drawn.append(await tasks.get(index))
        await asyncio.sleep(0)
    return drawn


class TaskCursor:
    """Draws tasks from a set: of a finite one each once per epoch, in a new order.

    A `curriculum`, which records finished groups, skips some tasks.
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
        drawn: list[Task] = []
        while len(drawn) < count:
            [task] = await tasks_at(self._tasks, [self._index()])
            if self._curriculum is None or not self._curriculum.is_skipped(task):
                drawn.append(task)
        return drawn

    def observe(self, groups: Sequence[Group]) -> None:
        """Record finished groups in the curriculum."""
        if self._curriculum is not None:
            self._curriculum.observe(groups)

    def metrics(self) -> dict[str, float]:
        """The curriculum's metrics since the last call."""
        return {} if self._curriculum is None else self._curriculum.metrics()

    def _index(self) -> int:
        position, self._position = self._position, self._position + 1
        size = self._tasks.size
        if size is None:
            return position
        epoch, offset = divmod(position, size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(size))
            random.Random(derived_seed(self._seed, "task order", epoch)).shuffle(self._order)
        return self._order[offset]

    def state(self) -> dict[str, Any]:
        """The position, for a checkpoint. Later calls do not change the returned values."""
        return {
            "position": self._position,
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        if self._curriculum is not None and state.get("curriculum") is not None:
            self._curriculum.load_state(state["curriculum"])
