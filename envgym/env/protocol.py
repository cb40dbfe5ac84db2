"""The interface of environments: settings, tasks, and an instance that runs one episode at a time."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from pydantic import Field

from envgym.errors import needs
from envgym.settings import Settings
from envgym.types import Action, Message, Task

if TYPE_CHECKING:
    import numpy

    from .spec import EnvSpec

Info = dict[str, Any]


class StepInfo(TypedDict, total=False):
    """The keys of a step's `info` that envgym reads. Other keys are allowed."""

    score: float | None
    """Success, in [0, 1], for success rates and filters. Without one the reward is the score, if the environment's
    rewards lie in [0, 1]."""
    answer: str | None
    """The policy's answer, as text: majority votes count equal texts as equal answers."""
    metrics: Mapping[str, float]
    """Further numbers by name, reported as `env/NAME`."""


StepResult = tuple[Any, float | None, bool, bool, StepInfo | Info]
"""(observation, reward, terminated, truncated, info), as in Gymnasium; a reward of None is no reward."""


class EnvConfig(Settings):
    """Base class of an environment's settings, with the settings of every environment. Unknown keys raise an error."""

    concurrency: int | None = Field(None, ge=1)
    """Maximum concurrent episodes of this environment; unset: the rollout's."""
    call_timeout: float = Field(120.0, gt=0)
    """Seconds a reset or a step may take before the episode counts as failed (`timeout`)."""
    processes: int = Field(0, ge=0)
    """Run instances in this many separate processes, whose crash ends episodes and not the run. 0: in the run's own."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded completion of a task, for replay."""

    turns: Sequence[str | Message]
    """The assistant's turns, in order."""
    rewards: Sequence[float | None] = ()
    """Reward of each turn; empty: unknown."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_single_turn: bool = False
    """True if the turns are parts of one assistant turn, joined without end-of-turn tokens."""


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


class Env(ABC):
    """One episode at a time of an environment, as Gymnasium's `Env`, but asynchronous and with text.

    Subclass it and write `reset` and `step`. An observation is a list of chat messages, raw text, or an `Observation`;
    `info` may have the keys of `StepInfo`. Settings (`envgym.make(id, difficulty=5)`, `env.difficulty=5`) are either
    the arguments of `__init__`, or the fields of a class `Config(envgym.EnvConfig)` in it, which `self.config` holds.

    Write a method that blocks as a plain `def`: it then runs on a thread of its instance.
    """

    blocking: ClassVar[bool] = False
    """True if the `async` methods block too (a busy loop, a synchronous client): they then run on a thread as well."""
    spec_class: ClassVar[type[EnvSpec]]
    """The class of the `spec` of an `Env` class that is registered, or named, by itself."""

    spec: EnvSpec
    """The shared part of the environment."""
    task: Task
    """The task of the episode, set before `reset`. For an environment without tasks it holds no more than the seed."""
    _np_random: numpy.random.Generator | int | None = None
    """The generator; before its first use, its seed."""

    @functools.cached_property
    def rng(self) -> random.Random:
        """Python's generator of this instance, seeded before `reset`. `np_random` is NumPy's. Never use global ones."""
        return random.Random()

    @functools.cached_property
    def config(self) -> Any:
        """The settings, `self.spec.config`."""
        return self.spec.config

    @property
    def unwrapped(self) -> Env:
        """The author's instance, without `CheckedEnv`, as in Gymnasium."""
        return self

    @property
    def np_random(self) -> numpy.random.Generator:
        """NumPy's generator of this instance, as in Gymnasium, with the seed of `rng`."""
        with needs("numpy", "train", "np_random"):
            import numpy
        env = self.unwrapped
        env._np_random = numpy.random.default_rng(env._np_random)
        return env._np_random

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Start an episode of `self.task` and return (observation, info); usually `async def`.

        `options["task"]` is the same task. `super().reset(seed=seed)`, awaited or not, seeds `rng` and `np_random`.
        """
        if seed is not None:
            self.rng.seed(seed)
            self._np_random = seed
        return _Awaitable()

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer one action with (observation, reward, terminated, truncated, info)."""

    async def close(self) -> None:
        """Release the resources of this instance. Called once, also after an error."""


class _Awaitable:
    """The return value of `Env.reset`: asynchronous overrides await it, synchronous ones only call."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()
