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
from envgym.env.data import DataEnvSpec
from envgym.env.protocol import posed_task
from envgym.errors import ConfigError, EnvgymError, ResetNeeded, UnknownKey, did_you_mean
from envgym.hashing import text_hash
from envgym.settings import Settings
from envgym.tasks import InProportion, Interleaved
from envgym.types import Action, Episode, Message, Observation, Task

SAMPLING = ("tool_calling", "multi_turn", "single_turn")
"""Names of the agent that samples turns; each also runs the environments of the later ones."""


class MixtureMember(Settings):
    """One environment of the mixture. Its own settings follow as further keys."""

    model_config = ConfigDict(extra="allow")

    env: str
    """Id, `file.py[:Name]`, import path or URL."""
    weight: float = Field(1.0, gt=0)
    """Its share of the tasks, relative to the other weights."""


class MixtureConfig(EnvConfig):
    members: dict[
        Annotated[str, Field(pattern=r"^[\w-]+$")],
        Annotated[MixtureMember, BeforeValidator(lambda value: {"env": value} if isinstance(value, str) else value)],
    ] = Field({})
    """The environments by name: `members.NAME.env`, `members.NAME.weight` and the environment's own settings."""


class Mixture(EnvSpec):
    """Several environments in one run: each task is run and scored by its own member."""

    Config = MixtureConfig
    config: MixtureConfig

    def __init__(self, id: str, /, **kwargs: Any) -> None:
        if "data" in kwargs:
            raise ConfigError(f"environment {id} takes no data: give a member some, env.members.NAME.data.path=…")
        super().__init__(id, **kwargs)
        if self.config.concurrency is not None:
            raise ConfigError(f"environment {id} has no limit: set env.members.NAME.concurrency")
        self.members = {name: self._make_member(name, member) for name, member in self.config.members.items()}
        for name, spec in self.members.items():  # so that a saved configuration holds every setting
            weight, settings = self.config.members[name].weight, spec.config.model_dump(mode="json")
            self.config.members[name] = MixtureMember(env=spec.id, weight=weight, **settings)
        self._task_sets: dict[str, TaskSet] = {}

    def _make_member(self, name: str, member: MixtureMember) -> EnvSpec:
        """Make a member's spec. Its errors name the member; a mixture as a member is a `ConfigError`."""
        try:
            spec = registry.spec(member.env, **(member.model_extra or {}))
        except UnknownKey as error:  # with a hint of the member's own settings
            raise ConfigError(f"member {name!r} of environment {self.id}: {error}") from None
        except EnvgymError as error:
            raise type(error)(f"member {name!r} of environment {self.id}: {error}") from None
        if isinstance(spec, Mixture):
            raise ConfigError(f"member {name!r} of environment {self.id} is a mixture itself: name its members here")
        return spec

    def fingerprint(self) -> dict[str, str]:
        """The fingerprints of the members, wherever they are served, and of their weights."""
        code = super().fingerprint()["code"]
        members = {name: spec.fingerprint() for name, spec in self.members.items()}
        weights = {name: member.weight for name, member in self.config.members.items()}
        return {
            "code": text_hash(json.dumps([code, {name: member["code"] for name, member in members.items()}])),
            "spec": text_hash(json.dumps([weights, {name: member["spec"] for name, member in members.items()}])),
        }

    def _require_members(self) -> None:
        if not self.members:
            raise ConfigError(f"environment {self.id} has no members: give it some with env.members.NAME.env=ID")

    def parts(self) -> Sequence[EnvSpec]:
        return list(self.members.values())

    def spec_for(self, task: Task) -> EnvSpec:
        if task.env not in self.members:
            raise ConfigError(
                f"environment {self.id} has no member {task.env!r} for task {task.id!r}."
                f"{did_you_mean(task.env, self.members)}"
            )
        return self.members[task.env]

    @property
    def agent(self) -> str:  # type: ignore[override]
        """The agent that can run every member. Raises `ConfigError` if there is none."""
        self._require_members()
        agent_of = {name: spec.agent for name, spec in self.members.items()}
        agents = set(agent_of.values())
        if len(agents) == 1:
            return agents.pop()
        if agents.issubset(SAMPLING):
            return min(agents, key=SAMPLING.index)
        pairs = ", ".join(f"{name} by {agent}" for name, agent in agent_of.items())
        raise ConfigError(f"no single agent runs all members of environment {self.id} ({pairs}): name one with agent=")

    @property
    def services(self) -> Mapping[str, Any]:
        """The members' services; each member has its own clients."""
        return {
            f"{member}-{name}": service
            for member, spec in self.members.items()
            for name, service in spec.services.items()
        }

    def concurrency_bound(self) -> int | None:
        return min((bound for spec in self.parts() if (bound := spec.concurrency_bound()) is not None), default=None)

    async def setup(self) -> None:
        self._require_members()
        for spec in self.parts():
            self.closing.push_async_callback(spec.close)
        results = await asyncio.gather(*(spec.ensure_setup() for spec in self.parts()), return_exceptions=True)
        if failures := [error for error in results if isinstance(error, BaseException)]:
            raise failures[0]
        members = [spec for spec in self.parts() if isinstance(spec, DataEnvSpec)]
        for spec in members:
            neighbours = [neighbour for neighbour in members if neighbour is not spec]
            if prompts := frozenset[int]().union(*(neighbour.held_out_prompts for neighbour in neighbours)):
                await spec.drop_held_out(prompts)

    async def teardown(self) -> None:
        self._task_sets.clear()

    def tasks(self, split: str) -> TaskSet:
        """The members' tasks: to train, endless and in exact proportions; to evaluate, each once."""
        if split not in self._task_sets:
            members = [MemberTasks(name, spec.tasks(split)) for name, spec in self.members.items()]
            if split == "train":
                members = [tasks for tasks in members if not _is_held_out(self.members[tasks.name])]
                if names := [tasks.name for tasks in members if tasks.size == 0]:
                    raise ConfigError(f"member {names[0]!r} of environment {self.id} has no training tasks")
                if not members:
                    raise ConfigError(f"all tasks of environment {self.id} are held out: add a member to train on")
            weights = [self.config.members[tasks.name].weight for tasks in members]
            self._task_sets[split] = (Interleaved if split == "train" else InProportion)(members, weights)
        return self._task_sets[split]

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        return self.spec_for(task).demonstrations(task, seed)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Any] | None:
        return await self.spec_for(task).score_group(task, episodes)

    def make(self) -> MixtureEnv:
        return MixtureEnv(self)


def _is_held_out(spec: EnvSpec) -> bool:
    """True if all tasks of a member are held out: it is only evaluated."""
    return isinstance(spec, DataEnvSpec) and spec.is_held_out


class MixtureEnv(CheckedEnv):
    """Delegates each episode to an instance of a member, which makes the checks.

    Runs and evaluations use the member directly (`Mixture.spec_for`). This class is for callers that expect a single
    environment: a server, the terminal, `envgym.make`.
    """

    spec: Mixture

    def __init__(self, spec: Mixture) -> None:
        self.rng = random.Random()
        super().__init__(self, spec)
        self._member: CheckedEnv | None = None

    async def acquire(self) -> None:
        """Do nothing: each member's `reset` observes the member's own limit."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.spec.ensure_setup()
        if seed is not None:
            self.rng.seed(seed)
        self.task = task = posed_task(options) or await self._draw_task(self.rng.getrandbits(31))
        spec = self.spec.spec_for(task)
        if self._member is None or self._member.spec is not spec:
            await self.close()
            self._member = spec.make()
        return await self._member.reset(seed=seed, options={**(options or {}), "task": task})

    async def step(self, action: Action | str) -> tuple[Observation, float | None, bool, bool, Info]:
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
    def index_bound(self) -> int:
        return self._tasks.index_bound

    def with_seed(self, seed: int) -> TaskSet:
        return MemberTasks(self.name, self._tasks.with_seed(seed))

    async def get(self, index: int) -> Task:
        task = await self._tasks.get(index)
        if task.env:  # a remote member: only its tasks show that it is a mixture
            raise ConfigError(f"member {self.name!r} is a mixture itself: name its members here")
        return replace(task, env=self.name)
