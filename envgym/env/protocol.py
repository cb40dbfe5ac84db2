"""The interface of environments: settings, tasks, an instance that runs one episode at a time, and the checks of it."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypedDict

from pydantic import Field

from envgym.errors import ConfigError, InvalidOutcome, InvalidStep, ResetNeeded, describe, needs
from envgym.loading import user_line
from envgym.processes.cancellation import call_in_time
from envgym.processes.threads import DedicatedThread
from envgym.settings import Settings
from envgym.types import Action, Message, Observation, Span, Tally, Task, as_action, as_observation
from envgym.types.episodes import check_numbers

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

    def fork(self) -> Env:
        """A copy of this instance in the middle of its episode, which from then on is apart from it: no step of either
        changes the other. Optional, for `rollout.branches`: an environment without it gets the actions again.

        A plain `def` that copies what `reset` and `step` change, `copy.copy(self)` if these are numbers and texts.
        `rng` and `np_random` are copied by the caller.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fork")


class _Awaitable:
    """The return value of `Env.reset`: asynchronous overrides await it, synchronous ones only call."""

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


class CheckedEnv(Env):
    """An environment with checks: the return value of `envgym.make` and `EnvSpec.make`.

    `reset` sets up the spec, draws a task by the seed unless `options["task"]` is one, and seeds the generators. Every
    call has a deadline and respects the concurrency limit. `InvalidStep` is raised for a return value other than a
    five-tuple with a finite reward (or None) and a score in [0, 1], and `ResetNeeded` for a step out of order. Metrics
    that are not finite numbers are dropped and counted (`invalid_metrics`).

    `step` also takes text. `unwrapped` is the author's instance; unknown public attributes are looked up there.
    `async with env:` closes it.
    """

    owns_spec = False
    """True if the spec belongs to this instance alone, and is closed with it."""
    odd_flag = ""
    """A phrase about the last `terminated` or `truncated` that was not a bool."""

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self.env = env
        self.spec = spec
        self.rng = env.rng
        self.task: Task | None = None  # type: ignore[assignment]  # before the first reset
        self.spans: list[Span] = []
        """The times of its resets and steps."""
        self.tally = Tally()
        self._playing = False
        self._has_slot = False
        methods = (env.reset, env.step, env.close)
        self._blocking = {
            method.__name__ for method in methods if env.blocking or not asyncio.iscoroutinefunction(method)
        }
        self._thread = DedicatedThread(spec.id) if self._blocking else None

    @property
    def unwrapped(self) -> Env:
        return self.env

    def __getattr__(self, name: str) -> Any:
        env = self.__dict__.get("env", self)
        if name.startswith("_") or env is self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(env, name)

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.spec.ensure_setup()
        await self.acquire()
        Env.reset(self.env, seed=seed)
        self.task = self.env.task = task = posed_task(options) or await self._draw_task(seed)
        options, seed = {**(options or {}), "task": task}, seed if task.seed is None else task.seed
        observation, info = await self._timed_call("(observation, info)", self.env.reset, seed=seed, options=options)
        if self.spec.shows_examples:
            observation = await self.spec.with_examples(observation, task)
        self._begin(observation)
        return observation, info

    def _begin(self, observation: Observation) -> None:
        """Begin an episode with its first observation."""
        self._playing, self.tally = True, Tally()
        self.tally.add(observation, None)

    async def first_observation(self, task: Task) -> Observation:
        """The first observation of `task`, of no episode, which takes no slot; the spec is set up."""
        Env.reset(self.env, seed=0)
        self.env.task = task
        reset, options = self.env.reset, {"task": task}
        observation: Observation = (await self._timed_call("(observation, info)", reset, seed=0, options=options))[0]
        return observation

    async def step(self, action: Action | str) -> tuple[Observation, float | None, bool, bool, Info]:
        if not self._playing:
            raise ResetNeeded(f"{self.spec.id}: call reset before step; the episode has ended or never began")
        action = action if isinstance(action, Action) else as_action(action)
        form = "(observation, reward, terminated, truncated, info)"
        observation, reward, terminated, truncated, info = await self._timed_call(form, self.env.step, action)
        try:
            reward = check_numbers(reward, info)
        except ValueError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None
        if type(terminated) is not bool or type(truncated) is not bool:
            self._check_flags({"terminated": terminated, "truncated": truncated})
        self._playing = not (terminated or truncated)
        self.tally.add(observation, reward)
        return observation, reward, bool(terminated), bool(truncated), info

    @property
    def can_fork(self) -> bool:
        """True if its author wrote a `fork`, and it runs in this process."""
        return type(self) is CheckedEnv and type(self.env).fork is not Env.fork

    def fork(self) -> CheckedEnv:
        """A copy of this instance, without a slot of the concurrency limit. Raises `InvalidStep` if the author's `fork`
        returns anything but another instance."""
        env = self.env.fork()
        if type(env) is not type(self.env) or env is self.env:
            raise InvalidStep(
                f"{self.spec.id}: fork must return another {type(self.env).__name__}, not {describe(env)}"
            )
        env.spec, env.task, env._np_random = self.env.spec, self.env.task, copy.deepcopy(self.env._np_random)
        env.rng = random.Random()
        env.rng.setstate(self.env.rng.getstate())
        fork = CheckedEnv(env, self.spec)
        fork.task, fork._playing, fork.tally = self.task, self._playing, replace(self.tally)
        return fork

    def _check_flags(self, flags: Mapping[str, Any]) -> None:
        """Raise `InvalidStep` for a coroutine, and remember another flag that is no bool for `envgym check`."""
        if any(inspect.iscoroutine(flag) for flag in flags.values()):  # a coroutine is true
            values = describe(tuple(flags.values()))
            raise InvalidStep(f"{self.spec.id}: terminated and truncated are true or false, not {values}")
        for name, flag in flags.items():
            if type(flag).__name__ not in ("bool", "bool_"):  # bool_ is NumPy's
                self.odd_flag = f"step returned {describe(flag)} as {name}"

    async def close(self) -> None:
        self._playing = False
        try:
            await self._close_instance()
        finally:
            if self.owns_spec:
                await self.spec.close()

    async def _close_instance(self) -> None:
        try:
            if self._thread is not None and self._thread.busy:
                # A call still blocks the thread; if it ever returns, the instance is closed there.
                self._thread.submit(self.env.close)
            else:
                await self._call(self.env.close)
        finally:
            if self._thread is not None:
                self._thread.end()
            self.release()

    @property
    def has_close(self) -> bool:
        """True if `close` does more than release the concurrency slot."""
        is_plain = type(self) is CheckedEnv and type(self.env).close is Env.close
        return not is_plain or self._thread is not None or self.owns_spec

    def release(self) -> None:
        """Release the concurrency slot, even if a call is still running."""
        self._playing = False
        if self._has_slot and self.spec.slots is not None:
            self._has_slot = False
            self.spec.slots.release()

    async def acquire(self) -> None:
        """Wait for a slot within the environment's concurrency limit. `close` releases it."""
        if self.spec.slots is not None and not self._has_slot:
            await self.spec.slots.acquire()
            self._has_slot = True

    async def _timed_call(self, form: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Like `_call`; its time is a span. The return value is a tuple of the `form`, its observation is converted.
        Raises `InvalidStep` for another return value."""
        start = time.time()
        try:
            result = await self._call(method, *args, **kwargs)
        finally:
            self.spans.append(("environment", round(start, 4), round(time.time(), 4)))
        if not (isinstance(result, tuple) and len(result) == len(form.split(",")) and isinstance(result[-1], dict)):
            raise InvalidStep(f"{self.spec.id}: {method.__name__} must return {form}, not {describe(result)}")
        observation = as_observation(result[0], self.spec.id)
        return await self._with_files(observation) if observation.has_images else observation, *result[1:]

    async def _with_files(self, observation: Observation) -> Observation:
        return await with_files(self.spec, observation)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await a method of the environment under its deadline."""
        if self._thread is not None and method.__name__ in self._blocking:
            call = self._thread.call(method, *args, **kwargs)
        else:
            call = method(*args, **kwargs)
        return await call_in_time(call, self.spec.config.call_timeout, f"{self.spec.id}: {method.__name__}")

    async def _draw_task(self, seed: int | None) -> Task:
        tasks = self.spec.tasks("train")
        if not tasks:
            raise ConfigError(f"environment {self.spec.id} has no training tasks")
        return await tasks.get(random.Random(seed).randrange(tasks.index_bound))


async def with_files(spec: EnvSpec, observation: Observation) -> Observation:
    """The observation with images as `EnvSpec.checked_images` returns them."""
    raw = Message("user", observation.images)
    raw, *messages = await spec.checked_images((raw, *observation.messages))
    return replace(observation, messages=tuple(messages), images=raw.images)


def posed_task(options: Mapping[str, Any] | None) -> Task | None:
    """The task in the options of a reset, or None. Raises `InvalidStep` for a value of another type."""
    task = (options or {}).get("task")
    if not isinstance(task, Task | None):
        raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
    return task


def environment_failure(error: BaseException) -> InvalidOutcome:
    """The failure of an episode whose environment raised `error`; the message names the line of the user's code."""
    location = f" ({line})" if (line := user_line(error)) else ""
    name = type(error).__name__
    message = f"{name}: {str(error) or name}{location}"
    return InvalidOutcome("environment", message, retryable=bool(getattr(error, "retryable", False)))
