"""The protocol that environments are written to: settings, tasks, and an instance that plays one episode at a time."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from envgym.settings import Settings
from envgym.types import Action, Message, Task

if TYPE_CHECKING:
    from .spec import EnvSpec

Info = dict[str, Any]
StepResult = tuple[Any, float | None, bool, bool, Info]


class EnvConfig(Settings):
    """Base class of an environment's settings, and those that all have. Unknown keys are refused."""

    concurrency: int | None = Field(None, ge=1)
    """Episodes of this environment in play at once; unset: as many as the rollout plays."""
    call_timeout: float = Field(120.0, gt=0)
    """Seconds a reset or a step may take before the episode counts as failed (`timeout`)."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded answer to a task, for replay."""

    turns: Sequence[str | Message]
    """The assistant's turns, in order."""
    rewards: Sequence[float | None] = ()
    """Reward of each turn; empty: nothing is known of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_single_turn: bool = False
    """The turns are pieces of one answer and follow each other as they stand, with no end of turn between."""


class TaskSet(ABC):
    """The tasks of one split, by index. Reading one may wait: remote sets are paged."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of tasks, or None where there is no end."""

    @abstractmethod
    async def get(self, index: int) -> Task:
        """The task at `index`, always the same one; IndexError past the end."""

    @property
    def index_bound(self) -> int:
        """Exclusive upper bound for random task indices: the size or, without end, as far as may be read at once."""
        return 2**31 if self.size is None else self.size

    def with_seed(self, seed: int) -> TaskSet:
        """The same tasks in an order drawn by `seed`, where the set itself decides on an order; else itself."""
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


class SeededTasks(TaskSet):
    """The task set of an environment that makes its problems from the seed: task `seed-N` is reset seed N.

    Train and test draw from disjoint seeds.
    """

    TEST_START = 2**31

    def __init__(self, split: str) -> None:
        self._start = self.TEST_START if split == "test" else 0

    @property
    def size(self) -> int | None:
        return None

    async def get(self, index: int) -> Task:
        return Task(id=f"seed-{self._start + index}", seed=self._start + index)


class Env(ABC):
    """One episode at a time of an environment.

    Subclass it and write `reset` and `step`. `self.spec` is the shared half, `self.rng` a generator
    of this instance's own; never touch the global one. An observation is a list of chat messages, raw
    text, or an `Observation`. `info` may carry `score` (a number in [0, 1]), `metrics` (names to numbers)
    and `answer` (what the policy answered, as text, by which majority votes count).

    Methods that block are written as plain `def`: they run on a thread of the instance's own.
    """

    blocking: ClassVar[bool] = False
    """Asynchronous methods that block all the same (a busy loop, a synchronous client) run on a thread as well."""
    spec_class: ClassVar[type[EnvSpec]]
    """The class of its shared half where an `Env` class is registered by itself."""

    spec: EnvSpec
    rng: random.Random

    @abstractmethod
    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode. `options["task"]` is the task to pose; without one it is drawn by the seed."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer one action with (observation, reward, terminated, truncated, info)."""

    async def close(self) -> None:
        """Release what this episode held. Called once, also after an error."""
