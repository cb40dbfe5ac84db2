"""Several environments in one run, each with a weight."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from envgym import registry
from envgym.env import CheckedEnv, EnvConfig, EnvSpec, Info, TaskSet
from envgym.env.checked import posed_task
from envgym.errors import ConfigError, EnvgymError, ResetNeeded, UnknownKey, did_you_mean
from envgym.hashing import text_hash
from envgym.settings import Settings
from envgym.tasks import InProportion, Interleaved
from envgym.types import Action, Episode, Message, Observation, Task

TURNS = {"single_turn", "multi_turn"}
ANY_TURNS = "tool_calling"
"""The agent that plays environments with tools, and without tools all those of `TURNS`."""


class MixtureMember(Settings):
    """One environment of the mixture, with its own settings beside these."""

    model_config = ConfigDict(extra="allow")

    env: str
    """Id, `file.py[:Name]`, import path or URL."""
    weight: float = Field(1.0, gt=0)
    """Its share of the tasks, against the others' weights."""


class MixtureConfig(EnvConfig):
    members: dict[
        Annotated[str, Field(pattern=r"^[\w-]+$")],
        Annotated[MixtureMember, BeforeValidator(lambda value: {"env": value} if isinstance(value, str) else value)],
    ] = Field({})
    """The environments by name: `members.NAME.env`, `members.NAME.weight` and the environment's own settings."""


class Mixture(EnvSpec):
    """Several environments in one run: a task is posed, played and judged by the member it comes from."""

    Config = MixtureConfig
    config: MixtureConfig

    def __init__(self, id: str, /, **kwargs: Any) -> None:
        if "data" in kwargs:
            raise ConfigError(
                f"environment {id} has no data of its own: give a member some, env.members.NAME.data.path=…"
            )
        super().__init__(id, **kwargs)
        if self.config.concurrency is not None:
            raise ConfigError(f"environment {id} has no limit of its own: set env.members.NAME.concurrency")
        self.members = {name: self._make_member(name, member) for name, member in self.config.members.items()}
        for name, spec in self.members.items():  # a saved configuration holds every setting of every member
            weight, settings = self.config.members[name].weight, spec.config.model_dump(mode="json")
            self.config.members[name] = MixtureMember(env=spec.id, weight=weight, **settings)
        self._task_sets: dict[str, TaskSet] = {}

    def _make_member(self, name: str, member: MixtureMember) -> EnvSpec:
        try:
            spec = registry.spec(member.env, **(member.model_extra or {}))
        except UnknownKey as error:  # its hint is of the member's own settings
            raise ConfigError(f"member {name!r} of environment {self.id}: {error}") from None
        except EnvgymError as error:
            raise type(error)(f"member {name!r} of environment {self.id}: {error}") from None
        if isinstance(spec, Mixture):
            raise ConfigError(f"member {name!r} of environment {self.id} is a mixture itself: name its members here")
        return spec

    def fingerprint(self) -> dict[str, str]:
        """That of its members, wherever they are served, and of their weights."""
        own = super().fingerprint()["code"]
        found = {name: spec.fingerprint() for name, spec in self.members.items()}
        weights = {name: member.weight for name, member in self.config.members.items()}
        return {
            "code": text_hash(json.dumps([own, {name: member["code"] for name, member in found.items()}])),
            "spec": text_hash(json.dumps([weights, {name: member["spec"] for name, member in found.items()}])),
        }

    def _refuse_emptiness(self) -> None:
        if not self.members:
            raise ConfigError(f"environment {self.id} has no members: give it some with env.members.NAME.env=ID")

    def parts(self) -> Sequence[EnvSpec]:
        return list(self.members.values())

    def of(self, task: Task) -> EnvSpec:
        if task.env not in self.members:
            raise ConfigError(
                f"environment {self.id} has no member {task.env!r} to play task {task.id!r}."
                f"{did_you_mean(task.env, self.members)}"
            )
        return self.members[task.env]

    @property
    def agent(self) -> str:  # type: ignore[override]
        """The agent that can play every member."""
        self._refuse_emptiness()
        wanted = {name: spec.agent for name, spec in self.members.items()}
        agents = set(wanted.values())
        if len(agents) == 1:
            return agents.pop()
        if agents <= TURNS | {ANY_TURNS}:
            return ANY_TURNS if ANY_TURNS in agents else EnvSpec.agent
        listed = ", ".join(f"{name} by {agent}" for name, agent in wanted.items())
        raise ConfigError(f"no one agent plays all members of environment {self.id} ({listed}): name one with agent=")

    @property
    def services(self) -> Mapping[str, Any]:
        """The members' services. The clients are theirs."""
        return {
            f"{member}-{name}": service
            for member, spec in self.members.items()
            for name, service in spec.services.items()
        }

    def concurrency_bound(self) -> int | None:
        return min((bound for spec in self.parts() if (bound := spec.concurrency_bound()) is not None), default=None)

    async def setup(self) -> None:
        self._refuse_emptiness()
        for spec in self.parts():
            self.closing.push_async_callback(spec.close)
        done = await asyncio.gather(*(spec.ensure_setup() for spec in self.parts()), return_exceptions=True)
        if failures := [error for error in done if isinstance(error, BaseException)]:
            raise failures[0]

    async def teardown(self) -> None:
        self._task_sets.clear()

    def tasks(self, split: str) -> TaskSet:
        """The members' tasks: for training without end, in exact proportions; to evaluate, each once."""
        if split not in self._task_sets:
            members = [MemberTasks(name, spec.tasks(split)) for name, spec in self.members.items()]
            weights = [member.weight for member in self.config.members.values()]
            if split == "train" and (empty := [tasks.name for tasks in members if tasks.size == 0]):
                raise ConfigError(f"member {empty[0]!r} of environment {self.id} has no training tasks")
            self._task_sets[split] = (Interleaved if split == "train" else InProportion)(members, weights)
        return self._task_sets[split]

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        return self.of(task).demonstrations(task, seed)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Any] | None:
        return await self.of(task).score_group(task, episodes)

    def make(self) -> MixtureEnv:
        return MixtureEnv(self)


class MixtureEnv(CheckedEnv):
    """Plays each episode on an instance of a member, which makes the checks.

    Runs and evaluations ask the spec for the member at once (`Mixture.of`); this serves those who know one
    environment only: a server, the terminal, `envgym.make`.
    """

    spec: Mixture

    def __init__(self, spec: Mixture) -> None:
        self.rng = random.Random()
        super().__init__(self, spec)
        self._member: CheckedEnv | None = None

    async def acquire(self) -> None:
        """Nothing: each member has a limit of its own, which its reset observes."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.spec.ensure_setup()
        if seed is not None:
            self.rng.seed(seed)
        self.task = task = posed_task(options) or await self._draw_task(self.rng.getrandbits(31))
        spec = self.spec.of(task)
        if self._member is None or self._member.spec is not spec:
            await self.close()
            self._member = spec.make()
        return await self._member.reset(seed=seed, options={**(options or {}), "task": task})

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if self._member is None:
            raise ResetNeeded(f"{self.spec.id}: call reset before step")
        return await self._member.step(action)

    async def close(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            await member.close()


class MemberTasks(TaskSet):
    """The tasks of the member `name`."""

    def __init__(self, name: str, tasks: TaskSet) -> None:
        self.name = name
        self._tasks = tasks

    @property
    def size(self) -> int | None:
        return self._tasks.size

    @property
    def reach(self) -> int:
        return self._tasks.reach

    def seeded(self, seed: int) -> TaskSet:
        return MemberTasks(self.name, self._tasks.seeded(seed))

    async def get(self, index: int) -> Task:
        task = await self._tasks.get(index)
        if task.env:  # a served member, which is known to be a mixture by its tasks alone
            raise ConfigError(f"member {self.name!r} is a mixture itself: name its members here")
        return replace(task, env=self.name)
