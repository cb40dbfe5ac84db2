"""The part of an environment that its instances share, which is also its description."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

from pydantic import ValidationError, create_model

from envgym.errors import ConfigError, DataError, InvalidStep, NameNotFound, reported_as
from envgym.hashing import source_hash, text_hash
from envgym.images import ImageFolder
from envgym.settings import settings_error
from envgym.tasks import SeededTasks, TaskSet
from envgym.types import Episode, ImagePart, Message, Observation, Reward, Task
from envgym.types.images import decoded
from envgym.types.messages import change_images, images_in

from .in_processes import EnvProcesses, ProcessEnv
from .protocol import CheckedEnv, Env, EnvConfig, Recording


class EnvSpec:
    """The part of an environment that its instances share, and its description as JSON.

    Gymnasium's `EnvSpec` is a record of how to make an environment; this one is such a record too, and also owns the
    settings, the tasks and the resources (set up once) that all episodes share. A run makes many instances of one spec
    with `spec.make()`, each for one episode at a time, so making one must be cheap.

    Most environments need no subclass: an `Env` class alone is wrapped in this one. Write one for tasks, demonstrations
    or resources, and name the `Env` class in `env_class`.
    """

    env_class: ClassVar[type[Env] | None] = None
    Config: ClassVar[type[EnvConfig]] = EnvConfig
    agent: ClassVar[str] = "multi_turn"
    """The default agent for it."""
    grader_packages: ClassVar[tuple[str, ...]] = ()
    """Distributions that decide rewards; their versions are in the fingerprint."""
    gives_rewards: ClassVar[bool] = True
    """False if steps give no rewards or scores by design: recordings to imitate."""
    starts_programs: ClassVar[bool] = False
    """True if resets and steps may take seconds because they start programs."""
    shows_examples: bool = False
    """True if `with_examples` changes first observations."""
    address: ClassVar[str] = "URL"
    """Of a class with a scheme: what is behind the scheme in a name. Only a URL leads to a server."""

    from_json: ClassVar[Callable[[str], EnvSpec]]
    """Builds an equal spec from `to_json`. The registry sets it."""

    def __init__(self, id: str, env_class: type[Env] | None = None, /, **kwargs: Any) -> None:
        self.id = id
        self._env_class = env_class or type(self).env_class
        config_class, self._arguments = _settings_of(self._env_class, type(self).Config, f"environment {id}")
        try:
            self.config = config_class(**kwargs)
        except ValidationError as error:
            raise settings_error(error, config_class, f"environment {id}") from None
        if self._hosts_instances and type(self).make is not EnvSpec.make:
            raise ConfigError(
                f"environment {id}: its instances are made elsewhere: set processes there, for each part of it or "
                "where it is served"
            )
        self.instance_processes: EnvProcesses
        """The processes that instances run in, with `env.processes`; made by `ensure_setup`."""
        self.clients: dict[str, Any] = {}
        """Clients of its `services`, by name. The runtime sets them before `setup`."""
        self.images: ImageFolder | None = None
        """The folder of the run's images. The runtime sets it; without one, messages hold the content of their
        images."""
        self.closing = AsyncExitStack()
        """Closes the resources that `setup` registers here, after `teardown` or if `setup` fails."""
        self._setup_lock = asyncio.Lock()
        self._is_set_up = False

    # -- description --------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The description, from which `registry.spec_from_json` builds an equal spec."""
        return json.dumps({"id": self.id, "kwargs": self.config.model_dump(mode="json", exclude_unset=True)})

    def __eq__(self, value: object) -> bool:
        return isinstance(value, EnvSpec) and self.to_json() == value.to_json()

    def __hash__(self) -> int:
        return hash(self.id)

    def fingerprint(self) -> dict[str, str]:
        """Hashes of the environment's `code` and of its `spec`, and the versions of its `grader_packages` (`grader`).
        Scores are comparable if these are equal."""
        versions = " ".join(f"{name} {_version(name)}" for name in self.grader_packages)
        return {
            "code": source_hash([cls for cls in (type(self), self._env_class) if cls not in (None, EnvSpec)]),
            "spec": text_hash(self.to_json()),
            **({"grader": versions} if versions else {}),
        }

    # -- methods to override ------------------------------------------------------------------------------

    @property
    def services(self) -> Mapping[str, Any]:
        """Models that the environment uses (reward model, judge, opponent), by name: declarations of `envgym.services`.

        The runtime starts them and puts their clients into `clients`.
        """
        return {}

    def spec_for(self, task: Task) -> EnvSpec:
        """The environment of `task`: this one, or a member of a mixture."""
        return self

    def parts(self) -> Sequence[EnvSpec]:
        """The environments in it: itself, or the members of a mixture."""
        return [self]

    def concurrency_bound(self) -> int | None:
        """Maximum number of concurrent episodes, whatever tasks they have; None: no maximum."""
        return self.config.concurrency

    async def setup(self) -> None:
        """Build shared resources, once, before the first episode; register in `closing` how to close them."""

    async def teardown(self) -> None:
        """Release the resources of `setup`."""

    def tasks(self, split: str) -> TaskSet:
        """The tasks of a split, `train` or `test`. The splits do not overlap."""
        return SeededTasks(split)

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The assistant's turns of a right solution of `task`, for replay; the seed picks a variant."""
        raise ConfigError(f"environment {self.id} has no demonstrations to replay")

    def worked_answer(self, task: Task) -> list[str | Message]:
        """The right answer to `task` as an example for other tasks shows it, with its working if the data has one."""
        return self.demonstrations(task, 0)

    async def with_examples(self, observation: Observation, task: Task) -> Observation:
        """The first observation of `task` with the examples before it that settings ask for."""
        return observation

    def cheats(self, task: Task, seed: int) -> Mapping[str, Sequence[str | Message]]:
        """Ways to a reward of `task` that is not earned, by their names: the assistant's turns of each. `envgym envs
        attack` tries them, as it does its own."""
        return {}

    def forgery(self, task: Task) -> str:
        """How a policy could get a reward of `task` that it has not earned, for `envgym envs check`. Empty: no way is
        known."""
        return ""

    @property
    def recordings_per_task(self) -> int:
        """Number of recordings per task. A replay runs each as a member of the task's group."""
        return 1

    def recording(self, task: Task, seed: int, member: int) -> Recording:
        """A recording of `task`, for replay; by default its demonstrations."""
        return Recording(self.demonstrations(task, seed))

    def conversations(self, task: Task) -> Sequence[Sequence[Message]]:
        """The recorded conversations of a task, whose messages are all read or trained on. Empty if the policy answers
        the task."""
        return ()

    async def score_group(
        self, task: Task, episodes: Sequence[Episode]
    ) -> Sequence[float | Reward | Exception | None] | None:
        """Score the finished episodes of one task together.

        Return a number, a `Reward`, None (no reward) or an exception (`InvalidOutcome`: it could not be scored) per
        episode. Return None instead of a list to leave the rewards of the steps in place.
        """
        return None

    @property
    def scores_groups(self) -> bool:
        """True if it overrides `score_group`, or a member of the mixture does."""
        return any(type(part).score_group is not EnvSpec.score_group for part in self.parts())

    @property
    def summary(self) -> str:
        """The first sentence of `docstring`."""
        return first_sentence(self.docstring)

    @property
    def docstring(self) -> str:
        """The author's description of the environment."""
        env_class = self._env_class if self._env_class is not type(self).env_class else None
        return docstring(env_class or type(self))  # an Env class that names its spec is described by itself

    @property
    def unanswered(self) -> str:
        """A note for the user: why episodes may have no answer in the form asked for, and which setting to change. A
        run shows it once, if all of its first episodes have the metric `answered` = 0. Empty: it shows none."""
        return ""

    # -- images -------------------------------------------------------------------------------------------

    def store_images(self, folder: ImageFolder) -> None:
        """Store the images of all episodes in a folder, also those of a mixture's members."""
        for part in (self, *self.parts()):
            part.images = folder

    async def checked_images(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages with images that were read to the end, on a thread, and stored in the run's folder. Raises
        `InvalidStep` for one that cannot be read."""
        if not images_in(messages):
            return messages
        try:
            store = self.images.store if self.images else ImagePart.from_value
            return await asyncio.to_thread(change_images, messages, lambda image: store(decoded(image)))
        except (ValueError, DataError) as error:
            raise InvalidStep(f"{self.id}: {error}") from None

    # -- making instances ---------------------------------------------------------------------------------

    def make(self) -> CheckedEnv:
        """A new instance, wrapped in `CheckedEnv`."""
        if self._env_class is None:
            raise ConfigError(f"environment {self.id} names no Env class")
        if self._hosts_instances:
            return ProcessEnv(self)
        env = self._env_class.__new__(self._env_class)
        env.spec = self
        arguments = {name: getattr(self.config, name) for name in self._arguments}
        env.__init__(**arguments)  # type: ignore[misc]  # after `spec` is set: it may read it
        return CheckedEnv(env, self)

    @functools.cached_property
    def slots(self) -> asyncio.Semaphore | None:
        """Slots for concurrent episodes; None without a limit."""
        limit = self.config.concurrency
        return None if limit is None else asyncio.Semaphore(limit)

    async def ensure_setup(self) -> None:
        """Run `setup` unless it has run. Concurrent callers wait for the first one's."""
        async with self._setup_lock:
            if not self._is_set_up:
                try:
                    await self.setup()
                    self._check_tasks()
                    if self._hosts_instances:
                        await self._start_processes()
                except BaseException:
                    await self.closing.aclose()
                    raise
                self._is_set_up = True

    @property
    def _hosts_instances(self) -> bool:
        """True if `env.processes` is set and has its general meaning: the settings class does not define it anew."""
        classes = [cls for cls in type(self.config).__mro__ if "processes" in vars(cls).get("__annotations__", {})]
        return bool(self.config.processes) and classes[:1] == [EnvConfig]

    async def _start_processes(self) -> None:
        """Start the processes that instances run in. Raises `ConfigError` if they cannot make this environment."""
        self.shows_examples = False  # the processes add them
        self.instance_processes = EnvProcesses(self)
        self.closing.push_async_callback(self.instance_processes.close)
        try:
            await self.instance_processes.pool.start()
        except NameNotFound as error:
            raise ConfigError(
                f"env.processes: another process cannot make environment {self.id} ({error}): define it in a file or a "
                "module, and give that"
            ) from None

    def _check_tasks(self) -> None:
        """Raise `ConfigError` if `tasks` returns anything but a task set. An error in `tasks` is raised at its use."""
        try:
            tasks: object = self.tasks("train")
        except Exception:
            return
        if not isinstance(tasks, TaskSet):
            kind = type(tasks).__name__
            raise ConfigError(f"environment {self.id}: tasks returns a task set, envgym.TaskList(…) say, not a {kind}")

    async def close(self) -> None:
        """Run `teardown` if `setup` ran, and close the resources that it registered."""
        if self._is_set_up:
            self._is_set_up = False
            try:
                await self.teardown()
            finally:
                await self.closing.aclose()

    async def __aenter__(self) -> Self:
        await self.ensure_setup()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


Env.spec_class = EnvSpec


def _settings_of(
    env_class: type[Env] | None, default: type[EnvConfig], context: str
) -> tuple[type[EnvConfig], list[str]]:
    """The settings class of an environment, and the names of the settings that are arguments of `__init__`."""
    config_class: type[EnvConfig] = getattr(env_class, "Config", None) or default
    if not issubclass(config_class, EnvConfig):
        raise ConfigError(f"{context}: its class Config must be a subclass of envgym.EnvConfig")
    if env_class is None:
        return config_class, []
    with reported_as(ConfigError, f"{context}: reset must take seed and options", cause=TypeError):
        inspect.signature(env_class.reset).bind(None, seed=None, options=None)
    if env_class.__init__ is object.__init__:
        return config_class, []
    fields: dict[str, Any] = {}
    try:
        for name, parameter in list(inspect.signature(env_class.__init__, eval_str=True).parameters.items())[1:]:
            kind, value = parameter.annotation, parameter.default
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"each must be passable by keyword, unlike {parameter}")
            if kind is parameter.empty:
                kind = Any if value is None or value is parameter.empty else type(value)
            fields[name] = (kind, ... if value is parameter.empty else value)
        if fields and config_class is not default:
            raise TypeError("it has a Config too, which they belong in")
        if fields:
            config_class = create_model(f"{env_class.__name__}Config", __base__=config_class, **fields)
    except (NameError, TypeError, RuntimeError) as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(f"{context}: the arguments of __init__ cannot be settings: {problem}") from None
    return config_class, list(fields)


def _version(distribution: str) -> str:
    """The installed version of a distribution, or `missing`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def first_sentence(text: str) -> str:
    """The first sentence of a description, as one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


def docstring(cls: type) -> str:
    """The docstring of an environment's class, else of its module. The docstrings of envgym's base classes do not
    count."""
    classes = [candidate for candidate in (getattr(cls, "env_class", None), cls) if candidate is not None]
    docs = [vars(candidate).get("__doc__") for candidate in classes]
    modules = [candidate.__module__ for candidate in classes]
    modules = [module for module in modules if not module.startswith(("envgym.", "__main__"))]
    docs += [getattr(sys.modules.get(name), "__doc__", None) for name in modules]
    return next((inspect.cleandoc(doc) for doc in docs if doc), "")
