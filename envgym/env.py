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
import json
import math
import numbers
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import ConfigError, InvalidStep, ResetNeeded
from .types import Action, Episode, Message, Observation, Task, as_observation

Info = dict[str, Any]
StepResult = tuple[Any, float | None, bool, bool, Info]


class EnvConfig(BaseModel):
    """Base class of an environment's settings. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class TaskSet(ABC):
    """The tasks of one split, by index. Reading one may wait: remote sets are paged."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of tasks, or None where there is no end."""

    @abstractmethod
    async def get(self, index: int) -> Task:
        """The task at `index`, always the same one; IndexError past the end."""


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
    text, or an `Observation`. `info` may carry `score` (a number in [0, 1]) and `metrics` (names to numbers).
    """

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
    services: ClassVar[Mapping[str, str]] = {}
    """Models this environment needs (reward model, judge, opponent): name -> kind. The runtime hands clients over."""

    def __init__(self, id: str, env_class: type[Env] | None = None, **kwargs: Any) -> None:
        self.id = id
        self._env_class = env_class or type(self).env_class
        config_class = getattr(self._env_class, "Config", None) or type(self).Config
        try:
            self.config = config_class(**kwargs)
        except ValidationError as error:
            raise ConfigError(f"environment {id}: {describe_validation_error(error, config_class)}") from None
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

    # -- what a subclass may override ---------------------------------------------------------------------

    async def setup(self) -> None:
        """Build what is heavy and shared, once, before the first episode."""

    async def teardown(self) -> None:
        """Release what `setup` built."""

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `train` or `test`. The two never overlap."""
        return SeedTasks(split)

    def demonstrations(self, task: Task, seed: int) -> list[str]:
        """Assistant answers that show how `task` is done, for replay; the seed picks among variants."""
        raise ConfigError(f"environment {self.id} has no demonstrations to replay")

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[float] | None:
        """Rewards for the finished episodes of one task where they are judged against each other; else None."""
        return None

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


class CheckedEnv(Env):
    """An environment behind the checks everyone relies on.

    Sets the spec up before the first reset, draws a task by the seed where none is given, gives the instance
    a generator of its own, refuses a step out of order, and refuses a step result that is not a five-tuple
    with a finite number (or None) as reward.
    """

    def __init__(self, env: Env, spec: EnvSpec) -> None:
        self.env = env
        self.spec = spec
        self.rng = env.rng
        self.task: Task | None = None
        self._playing = False

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.spec.ensure_setup()
        if seed is not None or self.task is None:
            self.env.rng.seed(seed)
        given = dict(options or {})
        task = given.get("task")
        if task is None:
            task = await self._draw_task(seed)
        elif not isinstance(task, Task):
            raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
        given["task"] = self.task = task
        result = await self.env.reset(seed=seed if task.seed is None else task.seed, options=given)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise InvalidStep(f"{self.spec.id}: reset must return (observation, info), not {result!r:.80}")
        self._playing = True
        return self._observation(result[0]), result[1]

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if not self._playing:
            raise ResetNeeded(f"{self.spec.id}: call reset before step; the episode has ended or never began")
        result = await self.env.step(action)
        if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
            raise InvalidStep(
                f"{self.spec.id}: step must return (observation, reward, terminated, truncated, info), "
                f"not {result!r:.80}"
            )
        observation, reward, terminated, truncated, info = result
        if reward is not None:
            if not isinstance(reward, numbers.Real) and not hasattr(reward, "__float__"):
                raise InvalidStep(f"{self.spec.id}: a reward is a number or None, not {reward!r:.80}")
            reward = float(reward)
            if not math.isfinite(reward):
                raise InvalidStep(f"{self.spec.id}: a reward must be finite, not {reward}")
        self._playing = not (terminated or truncated)
        return self._observation(observation), reward, bool(terminated), bool(truncated), info

    async def close(self) -> None:
        self._playing = False
        await self.env.close()

    async def _draw_task(self, seed: int | None) -> Task:
        tasks = self.spec.tasks("train")
        return await tasks.get(random.Random(seed).randrange(tasks.size if tasks.size is not None else 2**31))

    def _observation(self, value: Any) -> Observation:
        try:
            return as_observation(value)
        except TypeError as error:
            raise InvalidStep(f"{self.spec.id}: {error}") from None


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for the first problem pydantic found; an unknown key names its nearest neighbour."""
    from .errors import did_you_mean

    problems = error.errors()
    # A key that is unknown is often the misspelt one of another that is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}.{did_you_mean(where.rsplit('.', 1)[-1], known_keys(model, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"key {where!r} is required"
    if first["type"] in ("model_type", "dict_type"):
        return f"key {where!r} holds keys of its own ({where}.…), not {first['input']!r:.60}"
    return f"key {where!r}: {first['msg'].lower().removeprefix('value error, ')}, got {first['input']!r:.60}"


def known_keys(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """The field names of the nested model at `path` within `model`."""
    for part in path:
        info = model.model_fields.get(str(part))
        inner = info.annotation if info else None
        choices = get_args(inner) or (inner,)  # `Model | None` counts as Model
        nested = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


__all__ = [
    "Action", "CheckedEnv", "Env", "EnvConfig", "EnvSpec", "Info", "ListTasks", "Message", "Observation", "SeedTasks",
    "StepResult", "Task", "TaskSet", "describe_validation_error", "known_keys",
]  # fmt: skip
