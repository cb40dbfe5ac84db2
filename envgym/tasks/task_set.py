"""Task sets: the tasks of one split, by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from envgym.types import Task


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
    """Endless tasks: task `index` is `make(index)`, a function of the index alone."""

    def __init__(self, make: Callable[[int], Task]) -> None:
        self._make = make

    @property
    def size(self) -> int | None:
        return None

    async def get(self, index: int) -> Task:
        return self._make(index)


class SeededTasks(TaskSet):
    """The endless task set of an environment that generates its problems: task `seed-N` is reset seed N.

    The seeds of train and test are disjoint.
    """

    TEST_START = 2**31

    def __init__(self, split: str) -> None:
        self._start = self.TEST_START if split == "test" else 0

    @property
    def size(self) -> int | None:
        return None

    async def get(self, index: int) -> Task:
        return Task(id=f"seed-{self._start + index}", seed=self._start + index)
