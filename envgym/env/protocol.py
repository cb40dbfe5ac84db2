"""The interface of environments: settings, tasks, and an instance that runs one episode at a time."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
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
