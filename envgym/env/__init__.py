"""The environment protocol: asynchronous, Gymnasium's five-tuple.

    obs, info = await env.reset(seed=0)
    obs, reward, terminated, truncated, info = await env.step(action)
    await env.close()

An environment has two halves. `Env` plays one episode at a time and is cheap to make. `EnvSpec` holds what is
heavy and shared (tasks, indexes, process pools) and is set up once; it is also the environment's
JSON-serialisable description, from which an equal one can be rebuilt.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError

from envgym.errors import CallTimeout, ConfigError, InvalidStep, ResetNeeded
from envgym.hashing import source_hash, text_hash
from envgym.isolation.blocking import OwnThread
from envgym.isolation.deadline import Deadline
from envgym.settings import Settings, settings_error
from envgym.types import Action, Episode, Judgement, Message, Observation, Task, as_observation

MOST_CHARACTERS = 4_000_000
"""Of an observation: no context holds as many, and making tokens of them would hold everything up."""
Info = dict[str, Any]
StepResult = tuple[Any, float | None, bool, bool, Info]


class EnvConfig(Settings):
    """Base class of an environment's settings, and those that all have. Unknown keys are refused."""

    concurrency: int | None = Field(None, ge=1)
    """Episodes of this environment in play at once; unset: as many as the rollout plays."""
    call_timeout: float = Field(120.0, gt=0)
    """Seconds a reset or a step may take before the episode counts as failed (`timeout`)."""


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
    def reach(self) -> int:
        """Where a task drawn at random lies below: the size, and without end as far as may be read at once."""
        return 2**31 if self.size is None else self.size

    def seeded(self, seed: int) -> TaskSet:
        """The same tasks in an order drawn by `seed`, where the set itself decides on an order; else itself."""
        return self


class ListTasks(TaskSet):
    """A task set that is a list in memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    @property
    def size(self) -> int | None:
        return len(self._tasks)

    async def get(self, index: int) -> Task:
        return self._tasks[index]


class SeedTasks(TaskSet):
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
    """What stands for its shared half where an `Env` class is registered by itself."""

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


class EnvSpec:
    """An environment's shared half and its description.

    Most environments need none of their own: registering an `Env` subclass wraps it in this class. Subclass it
    where there are tasks, demonstrations, or something heavy to set up.
    """

    env_class: ClassVar[type[Env] | None] = None
    Config: ClassVar[type[EnvConfig]] = EnvConfig
    agent: ClassVar[str] = "multi_turn"
    """The agent that plays it unless told otherwise."""

    def __init__(self, id: str, env_class: type[Env] | None = None, /, **kwargs: Any) -> None:
        self.id = id
        self._env_class = env_class or type(self).env_class
        config_class = getattr(self._env_class, "Config", None) or type(self).Config
        try:
            self.config = config_class(**kwargs)
        except ValidationError as error:
            raise settings_error(error, config_class, f"environment {id}") from None
        self.clients: dict[str, Any] = {}
        """Clients of its `services`, by name: the runtime fills it in before `setup`."""
        self._slots: asyncio.Semaphore | None = None
        self._setup_lock: asyncio.Lock | None = None
        self._is_set_up = False

    # -- description --------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The description that `registry.spec_from_json` rebuilds this environment from."""
        return json.dumps({"id": self.id, "kwargs": self.config.model_dump(mode="json", exclude_unset=True)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnvSpec) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def fingerprint(self) -> dict[str, str]:
        """Hashes of the environment's `code` and of its `spec`, by which scores can be compared over time."""
        return {
            "code": source_hash([cls for cls in (type(self), self._env_class) if cls not in (None, EnvSpec)]),
            "spec": text_hash(self.to_json()),
        }

    # -- what a subclass may override ---------------------------------------------------------------------

    @property
    def services(self) -> Mapping[str, Any]:
        """Models this environment needs (reward model, judge, opponent), by name: declarations of `envgym.services`.

        The runtime starts them and hands their clients over in `clients`.
        """
        return {}

    def of(self, task: Task) -> EnvSpec:
        """The environment that plays `task`: this one, or the member of a mixture."""
        return self

    def parts(self) -> Sequence[EnvSpec]:
        """The environments this one is made of: itself, or the members of a mixture."""
        return [self]

    def concurrency_bound(self) -> int | None:
        """A number of episodes that may be in play at once whichever tasks they pose; None: any."""
        return self.config.concurrency

    async def setup(self) -> None:
        """Build what is heavy and shared, once, before the first episode."""

    async def teardown(self) -> None:
        """Release what `setup` built."""

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `train` or `test`. The two never overlap."""
        return SeedTasks(split)

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The assistant's turns, in order, that show how `task` is done, for replay; the seed picks among variants."""
        raise ConfigError(f"environment {self.id} has no demonstrations to replay")

    async def score_group(
        self, task: Task, episodes: Sequence[Episode]
    ) -> Sequence[float | Judgement | Exception | None] | None:
        """Where the finished episodes of one task are judged together: a reward or a `Judgement` for each, None for
        one that gets no reward, an exception (`InvalidOutcome`) for one that could not be judged. Else None."""
        return None

    @property
    def about(self) -> str:
        """What it is, in the first words of its author."""
        return self.docstring.partition("\n")[0]

    @property
    def docstring(self) -> str:
        """What it is, in its author's words."""
        return docstring(self._env_class if type(self) is EnvSpec and self._env_class else type(self))

    # -- making instances ---------------------------------------------------------------------------------

    def make(self) -> CheckedEnv:
        """A new instance, behind the checks every environment gets."""
        if self._env_class is None:
            raise ConfigError(f"environment {self.id} names no Env class")
        env = self._env_class.__new__(self._env_class)
        env.spec = self
        env.rng = random.Random()
        env.__init__()  # type: ignore[misc]  # after spec is there, so that a constructor may read it
        return CheckedEnv(env, self)

    async def ensure_setup(self) -> None:
        """Run `setup` once, however many ask for it at the same time."""
        if self._is_set_up:
            return
        if self._setup_lock is None:
            self._setup_lock = asyncio.Lock()
        async with self._setup_lock:
            if not self._is_set_up:
                await self.setup()
                self._is_set_up = True

    async def close(self) -> None:
        """Run `teardown` if `setup` ran."""
        if self._is_set_up:
            self._is_set_up = False
            await self.teardown()

    async def __aenter__(self) -> Self:
        await self.ensure_setup()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


Env.spec_class = EnvSpec


class CheckedEnv(Env):
    """An environment behind the checks everyone relies on.

    Sets the spec up before the first reset, draws a task by the seed where none is given, gives the instance
    a generator of its own, keeps to the environment's concurrency limit and to the deadline of each call, refuses a
    step out of order, and refuses what is not a five-tuple with a finite number (or None) as reward and a score in
    [0, 1]. Metrics that are not finite numbers are left out and counted (`invalid_metrics`).
    `async with env:` closes it on every way out.
    """

    owns_spec = False
    """Whether nobody else uses the spec, which is then closed with the instance."""

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self.env = env
        self.spec = spec
        self.rng = env.rng
        self.task: Task | None = None
        self._playing = False
        self._has_slot = False
        methods = (env.reset, env.step, env.close)
        self._blocking = {
            method.__name__ for method in methods if env.blocking or not asyncio.iscoroutinefunction(method)
        }
        self._thread = OwnThread(spec.id) if self._blocking else None

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
        given = dict(options or {})
        task = given.get("task")
        if task is None:
            task = await self._draw_task(seed)
        elif not isinstance(task, Task):
            raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
        given["task"] = self.task = task
        result = await self._call(self.env.reset, seed=seed if task.seed is None else task.seed, options=given)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise InvalidStep(f"{self.spec.id}: reset must return (observation, info), not {result!r:.80}")
        self._playing = True
        return self._observation(result[0]), result[1]

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if not self._playing:
            raise ResetNeeded(f"{self.spec.id}: call reset before step; the episode has ended or never began")
        result = await self._call(self.env.step, action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise InvalidStep(
                f"{self.spec.id}: step must return (observation, reward, terminated, truncated, info), "
                f"not {result!r:.80}"
            )
        observation, reward, terminated, truncated, info = result
        try:
            reward = checked_numbers(reward, info)
        except ValueError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None
        self._playing = not (terminated or truncated)
        return self._observation(observation), reward, bool(terminated), bool(truncated), info

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
            self.leave()

    @property
    def has_close(self) -> bool:
        """Whether there is anything to do at its end but to give the place back."""
        is_plain = type(self) is CheckedEnv and type(self.env).close is Env.close
        return not is_plain or self._thread is not None or self.owns_spec

    def leave(self) -> None:
        """Give the place back, whatever the instance still does."""
        self._playing = False
        if self._has_slot and self.spec._slots is not None:
            self._has_slot = False
            self.spec._slots.release()

    async def acquire(self) -> None:
        """Wait until the environment's concurrency limit lets this instance play. `close` gives the place back."""
        if self._has_slot or self.spec.config.concurrency is None:
            return
        if self.spec._slots is None:
            self.spec._slots = asyncio.Semaphore(self.spec.config.concurrency)
        await self.spec._slots.acquire()
        self._has_slot = True

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Await a method of the environment under its deadline."""
        deadline = Deadline(self.spec.config.call_timeout)
        try:
            async with deadline:
                if self._thread is not None and method.__name__ in self._blocking:
                    result = await self._thread.call(method, *args, **kwargs)
                else:
                    result = await method(*args, **kwargs)
            if not deadline.expired():
                return result
        except TimeoutError:
            if not deadline.expired():
                raise  # the environment's own
        raise CallTimeout(f"{self.spec.id}: {method.__name__} took longer than {self.spec.config.call_timeout:g} s")

    async def _draw_task(self, seed: int | None) -> Task:
        tasks = self.spec.tasks("train")
        return await tasks.get(random.Random(seed).randrange(tasks.reach))

    def _observation(self, value: Any) -> Observation:
        try:
            observation = as_observation(value)
        except TypeError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None
        size = len(observation.text or "") + sum(len(message.text) for message in observation.messages)
        if size > MOST_CHARACTERS:
            raise InvalidStep(
                f"{self.spec.id}: an observation has {size:,} characters, more than the {MOST_CHARACTERS:,} that are "
                "rendered: show the policy a part of it"
            )
        return observation


def first_words(cls: type) -> str:
    """The first line of the docstring that an environment's author wrote."""
    return docstring(cls).partition("\n")[0]


def docstring(cls: type) -> str:
    """What an environment's author wrote of it: in the class, not in one of ours above it, or in its file."""
    classes = [one for one in (getattr(cls, "env_class", None), cls) if one is not None]
    docs = [vars(one).get("__doc__") for one in classes]
    modules = [one.__module__ for one in classes if not one.__module__.startswith(("envgym.", "__main__"))]
    docs += [getattr(sys.modules.get(name), "__doc__", None) for name in modules]
    return next((inspect.cleandoc(doc) for doc in docs if doc), "")


def checked_numbers(reward: Any, info: Info) -> float | None:
    """The reward of a step as a number; `score` and `metrics` in `info` are made numbers too. Raises `ValueError`."""
    paid = None if reward is None else _number("a reward", reward)
    if (score := info.get("score")) is not None:
        info["score"] = score = _number("a score", score)
        if not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not at {score:g}")
    if (metrics := info.get("metrics")) is not None:
        if not isinstance(metrics, Mapping):
            raise ValueError(f"info['metrics'] is names to numbers, not {metrics!r:.80}")
        info["metrics"] = _finite(metrics)
    return paid


def _number(what: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # nearly all are, and the next check takes a while
        return value
    if not isinstance(value, numbers.Real) and not hasattr(value, "__float__"):
        raise ValueError(f"{what} is a number or None, not {value!r:.80}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers, say
        raise ValueError(f"{what} is one number, not {value!r:.80} ({error})") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}")
    return number


def _finite(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics that are finite numbers, and how many were not."""
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if math.isfinite(number := float(value)):
                kept[str(name)] = number
    return kept if len(kept) == len(metrics) else kept | {"invalid_metrics": float(len(metrics) - len(kept))}


__all__ = [
    "Action", "CheckedEnv", "Env", "EnvConfig", "EnvSpec", "Info", "ListTasks", "Message", "Observation", "SeedTasks",
    "StepResult", "Task", "TaskSet",
]  # fmt: skip
