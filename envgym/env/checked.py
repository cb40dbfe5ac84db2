"""The checks between every environment and its caller."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from envgym.errors import ConfigError, InvalidOutcome, InvalidStep, ResetNeeded
from envgym.loading import user_line
from envgym.processes.cancellation import call_in_time
from envgym.processes.threads import DedicatedThread
from envgym.rewards.numbers import check_numbers, coroutines_in, describe
from envgym.types import Action, Observation, Span, Task, as_action, as_observation

from .protocol import Env, Info

if TYPE_CHECKING:
    from .spec import EnvSpec

MAX_CHARACTERS = 4_000_000
"""Maximum characters of an observation, with its tools and sampling parameters. A longer one fits no context, and would
stall the tokenizer."""


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
        result = await self._timed_call(self.env.reset, seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise InvalidStep(f"{self.spec.id}: reset must return (observation, info), not {describe(result)}")
        self._playing = True
        return self._checked_observation(result[0]), result[1]

    async def step(self, action: Action | str) -> tuple[Observation, float | None, bool, bool, Info]:
        if not self._playing:
            raise ResetNeeded(f"{self.spec.id}: call reset before step; the episode has ended or never began")
        action = action if isinstance(action, Action) else as_action(action)
        result = await self._timed_call(self.env.step, action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise InvalidStep(
                f"{self.spec.id}: step must return (observation, reward, terminated, truncated, info), "
                f"not {describe(result)}"
            )
        observation, reward, terminated, truncated, info = result
        try:
            reward = check_numbers(reward, info)
        except ValueError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None
        if type(terminated) is not bool or type(truncated) is not bool:
            self._check_flags({"terminated": terminated, "truncated": truncated})
        self._playing = not (terminated or truncated)
        return self._checked_observation(observation), reward, bool(terminated), bool(truncated), info

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

    async def _timed_call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `_call`; its time is a span."""
        start = time.time()
        try:
            return await self._call(method, *args, **kwargs)
        finally:
            self.spans.append(("environment", round(start, 4), round(time.time(), 4)))

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

    def _checked_observation(self, value: Any) -> Observation:
        """Convert an observation. Raises `InvalidStep` for another type and for one over `MAX_CHARACTERS`."""
        try:
            observation = as_observation(value)
        except TypeError as error:
            of_coroutine = f"an observation is text, messages or an Observation, not {describe(value)}"
            raise InvalidStep(f"{self.spec.id}: {of_coroutine if coroutines_in(value) else error}") from None
        if (size := observation.n_characters) > MAX_CHARACTERS:
            raise InvalidStep(
                f"{self.spec.id}: an observation has {size:,} characters, more than the {MAX_CHARACTERS:,} that are "
                "rendered: show the policy a part of it"
            )
        return observation


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
