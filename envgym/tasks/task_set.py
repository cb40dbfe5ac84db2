"""Task sets: the tasks of one split by index, and the order in which a run draws them."""

from __future__ import annotations

import asyncio
import inspect
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from envgym.errors import RunError
from envgym.hashing import derived_seed
from envgym.types import Group, Task

if TYPE_CHECKING:
    from .curriculum import Curriculum


class TaskSet(ABC):
    """The tasks of one split, by index. `get` is asynchronous, since remote sets are read in pages."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of tasks; None for an endless set."""

    @property
    def epoch_size(self) -> int | None:
        """Number of draws until each task was drawn at least once; None if there is no such number."""
        return self.size

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("an endless task set has no len()")
        return self.size

    def __bool__(self) -> bool:
        return self.size != 0

    @abstractmethod
    async def get(self, index: int) -> Task:
        """The task at `index`, always the same. Raises `IndexError` past the end."""

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound for random task indices: the size, or 2**31 for an endless set."""
        return 2**31 if self.size is None else self.size

    def with_seed(self, seed: int) -> TaskSet:
        """The same tasks in an order drawn by `seed`, if the set has a random order; else the set itself."""
        return self


class TaskList(TaskSet):
    """A task set that is a list in memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    @property
    def size(self) -> int | None:
        return len(self._tasks)

    async def get(self, index: int) -> Task:
        return self._tasks[index]


class GeneratedTasks(TaskSet):
    """Tasks by a function of their index: task `index` is `make(index)`, which may be a coroutine. They are endless, or
    `size` of them."""

    def __init__(self, make: Callable[[int], Task | Awaitable[Task]], size: int | None = None) -> None:
        self._make = make
        self._size = size

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if self._size is not None and index >= self._size:
            raise IndexError(index)
        task = self._make(index)
        return await task if inspect.isawaitable(task) else task


class SeededTasks(GeneratedTasks):
    """The endless task set of an environment that generates its problems: task `seed-N` is reset seed N.

    The seeds of train and test are disjoint.
    """

    TEST_START = 2**31

    def __init__(self, split: str) -> None:
        start = self.TEST_START if split == "test" else 0
        super().__init__(lambda index: Task(id=f"seed-{start + index}", seed=start + index))


async def tasks_at(tasks: TaskSet, indices: Iterable[int]) -> list[Task]:
    """The tasks at these indices. Yields to the event loop after each, for example to a signal handler."""
    drawn = []
    for index in indices:
        drawn.append(await tasks.get(index))
        await asyncio.sleep(0)
    return drawn


class EpochOrder:
    """The numbers below `size` without end, each once per epoch, in an order that `seed` and the epoch's number draw.
    Without a size, all numbers as they are."""

    def __init__(self, size: int | None, *seed: object) -> None:
        self._size, self._seed = size, seed
        self._epoch, self._order = -1, array("Q")

    def __getitem__(self, position: int) -> int:
        if self._size is None:
            return position
        epoch, offset = divmod(position, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("Q", range(self._size))
            random.Random(derived_seed(*self._seed, epoch)).shuffle(self._order)
        return self._order[offset]


class TaskCursor:
    """Draws tasks from a set: of a finite one each once per epoch, in a new order.

    A `curriculum`, which records finished groups, skips some tasks.
    """

    def __init__(self, tasks: TaskSet, seed: int, curriculum: Curriculum | None = None) -> None:
        self._tasks = tasks.with_seed(seed)
        self._order = EpochOrder(self._tasks.size, seed, "task order")
        self._curriculum = curriculum
        self._position = 0
        if tasks.size == 0:
            raise RunError("the environment has no training tasks")

    async def next(self, count: int) -> list[Task]:
        """The next `count` tasks."""
        drawn: list[Task] = []
        while len(drawn) < count:
            index, self._position = self._order[self._position], self._position + 1
            [task] = await tasks_at(self._tasks, [index])
            if self._curriculum is None or not self._curriculum.is_skipped(task):
                drawn.append(task)
        return drawn

    @property
    def n_drawn(self) -> int | None:
        """The number of tasks drawn so far; None with a curriculum, which skips some."""
        return self._position if self._curriculum is None else None

    def observe(self, groups: Sequence[Group]) -> None:
        """Record finished groups in the curriculum."""
        if self._curriculum is not None:
            self._curriculum.observe(groups)

    def metrics(self) -> dict[str, float]:
        """The curriculum's metrics since the last call."""
        return {} if self._curriculum is None else self._curriculum.metrics()

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
