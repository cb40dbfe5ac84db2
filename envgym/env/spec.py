"""The shared half of an environment, which is also its description."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from envgym.errors import ConfigError
from envgym.hashing import source_hash, text_hash
from envgym.settings import settings_error
from envgym.types import Episode, Message, Reward, Task

from .checked import CheckedEnv
from .protocol import Env, EnvConfig, Recording, SeededTasks, TaskSet


class EnvSpec:
    """An environment's shared half and its description.

    Most environments need none of their own: registering an `Env` subclass wraps it in this class. Subclass it
    where there are tasks, demonstrations, or something heavy to set up.
    """

    env_class: ClassVar[type[Env] | None] = None
    Config: ClassVar[type[EnvConfig]] = EnvConfig
    agent: ClassVar[str] = "multi_turn"
    """The agent that plays it unless told otherwise."""
    gives_rewards: ClassVar[bool] = True
    """False where no step is meant to give a reward or a score: recordings to imitate."""

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
        self.closing = AsyncExitStack()
        """Closes what `setup` registers here, after `teardown` or where `setup` itself fails."""
        self._setup_lock = asyncio.Lock()
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

    def spec_for(self, task: Task) -> EnvSpec:
        """The environment that plays `task`: this one, or the member of a mixture."""
        return self

    def parts(self) -> Sequence[EnvSpec]:
        """The environments this one is made of: itself, or the members of a mixture."""
        return [self]

    def concurrency_bound(self) -> int | None:
        """A number of episodes that may be in play at once whichever tasks they pose; None: any."""
        return self.config.concurrency

    async def setup(self) -> None:
        """Build what is heavy and shared, once, before the first episode; register in `closing` what must be closed."""

    async def teardown(self) -> None:
        """Release what `setup` built."""

    def tasks(self, split: str) -> TaskSet:
        """The tasks of `train` or `test`. The two never overlap."""
        return SeededTasks(split)

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The assistant's turns, in order, that show how `task` is done, for replay; the seed picks among variants."""
        raise ConfigError(f"environment {self.id} has no demonstrations to replay")

    @property
    def recordings_per_task(self) -> int:
        """Recordings of each task: a replay plays all of them, each as a member of the task's group."""
        return 1

    def recording(self, task: Task, seed: int, member: int) -> Recording:
        """A recording of `task`, for replay; by default its demonstrations."""
        return Recording(self.demonstrations(task, seed))

    async def score_group(
        self, task: Task, episodes: Sequence[Episode]
    ) -> Sequence[float | Reward | Exception | None] | None:
        """Judge the finished episodes of one task together: a reward or a `Reward` for each, None for one that gets
        no reward, an exception (`InvalidOutcome`) for one that could not be judged. None: they are judged alone."""
        return None

    @property
    def scores_groups(self) -> bool:
        """True if it judges the episodes of a task together, or one of its parts does."""
        return any(type(part).score_group is not EnvSpec.score_group for part in self.parts())

    @property
    def summary(self) -> str:
        """The first sentence of its author's description."""
        return first_sentence(self.docstring)

    @property
    def docstring(self) -> str:
        """Its author's description."""
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

    @functools.cached_property
    def slots(self) -> asyncio.Semaphore | None:
        """Places for its episodes in play; None where their number has no limit."""
        limit = self.config.concurrency
        return None if limit is None else asyncio.Semaphore(limit)

    async def ensure_setup(self) -> None:
        """Run `setup` once, however many ask for it at the same time."""
        async with self._setup_lock:
            if not self._is_set_up:
                try:
                    await self.setup()
                except BaseException:
                    await self.closing.aclose()
                    raise
                self._is_set_up = True

    async def close(self) -> None:
        """Run `teardown` if `setup` ran, and close what that registered."""
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


def first_sentence(text: str) -> str:
    """The first sentence of a description, in one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


def docstring(cls: type) -> str:
    """The description that an environment's author wrote: in the class, not in one of ours above it, or in its file."""
    classes = [one for one in (getattr(cls, "env_class", None), cls) if one is not None]
    docs = [vars(one).get("__doc__") for one in classes]
    modules = [one.__module__ for one in classes if not one.__module__.startswith(("envgym.", "__main__"))]
    docs += [getattr(sys.modules.get(name), "__doc__", None) for name in modules]
    return next((inspect.cleandoc(doc) for doc in docs if doc), "")
