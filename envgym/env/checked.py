"""The checks that stand between every environment and whoever plays it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import numbers
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from envgym.errors import InvalidStep, ResetNeeded
from envgym.processes.deadline import call_in_time
from envgym.processes.threads import DedicatedThread
from envgym.types import Action, Observation, Span, Task, as_observation, timed

from .protocol import Env, Info

if TYPE_CHECKING:
    from .spec import EnvSpec

MOST_CHARACTERS = 4_000_000
"""Of an observation: no context holds as many, and making tokens of them would hold everything up."""


class CheckedEnv(Env):
    """An environment behind the checks everyone relies on.

    Sets the spec up before the first reset, draws a task by the seed where none is given, gives the instance
    a generator of its own, keeps to the environment's concurrency limit and to the deadline of each call, refuses a
    step out of order, and refuses what is not a five-tuple with a finite number (or None) as reward and a score in
    [0, 1]. Metrics that are not finite numbers are left out and counted (`invalid_metrics`).
    `async with env:` closes it on every way out.
    """

    owns_spec = False
    """True if nobody else uses the spec, which is then closed with the instance."""
    odd_flag = ""
    """A value of `terminated` or `truncated` that is no truth value, as part of a sentence."""

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self.env = env
        self.spec = spec
        self.rng = env.rng
        self.task: Task | None = None
        self.spans: list[Span] = []
        """The times of its resets and steps."""
        self._playing = False
        self._has_slot = False
        methods = (env.reset, env.step, env.close)
        self._blocking = {
            method.__name__ for method in methods if env.blocking or not asyncio.iscoroutinefunction(method)
        }
        self._thread = DedicatedThread(spec.id) if self._blocking else None

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
        if seed is not None or self.task is None:
            self.env.rng.seed(seed)
        self.task = task = posed_task(options) or await self._draw_task(seed)
        options, seed = {**(options or {}), "task": task}, seed if task.seed is None else task.seed
        with timed(self.spans, "environment"):
            result = await self._call(self.env.reset, seed=seed, options=options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise InvalidStep(f"{self.spec.id}: reset must return (observation, info), not {shown(result)}")
        self._playing = True
        return self._observation(result[0]), result[1]

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if not self._playing:
            raise ResetNeeded(f"{self.spec.id}: call reset before step; the episode has ended or never began")
        with timed(self.spans, "environment"):
            result = await self._call(self.env.step, action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise InvalidStep(
                f"{self.spec.id}: step must return (observation, reward, terminated, truncated, info), "
                f"not {shown(result)}"
            )
        observation, reward, terminated, truncated, info = result
        try:
            reward = checked_numbers(reward, info)
        except ValueError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None
        if type(terminated) is not bool or type(truncated) is not bool:
            self._note_flags({"terminated": terminated, "truncated": truncated})
        self._playing = not (terminated or truncated)
        return self._observation(observation), reward, bool(terminated), bool(truncated), info

    def _note_flags(self, flags: Mapping[str, Any]) -> None:
        if any(inspect.iscoroutine(flag) for flag in flags.values()):  # each is true
            wrong = shown(tuple(flags.values()))
            raise InvalidStep(f"{self.spec.id}: terminated and truncated are true or false, not {wrong}")
        for name, flag in flags.items():
            if type(flag).__name__ not in ("bool", "bool_"):  # and not NumPy's
                self.odd_flag = f"step returned {shown(flag)} as {name}"

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
                # A call that hung is still on the thread; should it ever return, the instance is closed there.
                self._thread.submit(self.env.close)
            else:
                await self._call(self.env.close)
        finally:
            if self._thread is not None:
                self._thread.end()
            self.release()

    @property
    def has_close(self) -> bool:
        """True if there is anything to do at its end but to give the place back."""
        is_plain = type(self) is CheckedEnv and type(self.env).close is Env.close
        return not is_plain or self._thread is not None or self.owns_spec

    def release(self) -> None:
        """Give the place back, whatever the instance still does."""
        self._playing = False
        if self._has_slot and self.spec.slots is not None:
            self._has_slot = False
            self.spec.slots.release()

    async def acquire(self) -> None:
        """Wait until the environment's concurrency limit lets this instance play. `close` gives the place back."""
        if self.spec.slots is not None and not self._has_slot:
            await self.spec.slots.acquire()
            self._has_slot = True

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await a method of the environment under its deadline."""
        if self._thread is not None and method.__name__ in self._blocking:
            call = self._thread.call(method, *args, **kwargs)
        else:
            call = method(*args, **kwargs)
        return await call_in_time(call, self.spec.config.call_timeout, f"{self.spec.id}: {method.__name__}")

    async def _draw_task(self, seed: int | None) -> Task:
        tasks = self.spec.tasks("train")
        return await tasks.get(random.Random(seed).randrange(tasks.index_bound))

    def _observation(self, value: Any) -> Observation:
        try:
            observation = as_observation(value)
            size = len(observation.text or "") + sum(len(message.text) for message in observation.messages)
        except TypeError as error:
            of_coroutine = f"an observation is text, messages or an Observation, not {shown(value)}"
            raise InvalidStep(f"{self.spec.id}: {of_coroutine if _coroutines(value) else error}") from None
        if size > MOST_CHARACTERS:
            raise InvalidStep(
                f"{self.spec.id}: an observation has {size:,} characters, more than the {MOST_CHARACTERS:,} that are "
                "rendered: show the policy a part of it"
            )
        return observation


def posed_task(options: Mapping[str, Any] | None) -> Task | None:
    """The task among the options of a reset; None where there is none. Raises `InvalidStep` for anything else."""
    task = (options or {}).get("task")
    if not isinstance(task, Task | None):
        raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
    return task


def checked_numbers(reward: Any, info: Info) -> float | None:
    """The reward of a step as a number; `score` and `metrics` in `info` are made numbers too. Raises `ValueError`."""
    number = None if reward is None else _number("a reward", reward)
    if (score := info.get("score")) is not None:
        info["score"] = score = _number("a score", score)
        if not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not at {score:g}")
    if (metrics := info.get("metrics")) is not None:
        if not isinstance(metrics, Mapping):
            raise ValueError(f"info['metrics'] is names to numbers, not {shown(metrics)}")
        info["metrics"] = finite_metrics(metrics)
    return number


def _number(what: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # nearly all are, and the next check takes a while
        return value
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise ValueError(f"{what} is a number or None, not {shown(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers, say
        raise ValueError(f"{what} is one number, not {value!r:.80} ({error})") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}")
    return number


def shown(value: Any) -> str:
    """A value that a call returned, as part of a sentence on the value that it should have returned."""
    if not (forgotten := _coroutines(value)):
        return f"{value!r:.80}"
    for coroutine in forgotten:
        coroutine.close()  # or Python warns, later and elsewhere, that nobody awaited it
    return f"a coroutine: an await is missing before {forgotten[0].__name__}(…)"


def _coroutines(value: Any) -> list[Any]:
    """The coroutines in what a call returned: in a tuple, in messages, wherever one was forgotten."""
    if inspect.iscoroutine(value):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [coroutine for part in parts for coroutine in _coroutines(part)]


def finite_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics that are finite numbers, and how many were not."""
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if math.isfinite(number := float(value)):
                kept[str(name)] = number
    return kept if len(kept) == len(metrics) else kept | {"invalid_metrics": float(len(metrics) - len(kept))}
