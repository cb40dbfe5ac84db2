"""Attempts: the episodes of a group's members, each a function of its group, task, member and number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from envgym.agent import Agent
from envgym.engine import ChatEngine, Engine
from envgym.env import CheckedEnv, EnvSpec
from envgym.hashing import derived_seed, task_hash
from envgym.services.policy import LOCKSTEP
from envgym.transcript import EpisodeSampler, LockstepBatcher
from envgym.types import Episode, Task

from .branches import Branch, BranchSampler, Forks, RepeatedEnv
from .config import RolloutConfig
from .episode import run_episode

if TYPE_CHECKING:
    from .runner import SamplingPlan

Work = Coroutine[Any, Any, Episode]
Wrap = Callable[[CheckedEnv], CheckedEnv]


class Attempt(NamedTuple):
    """One try of a group's member at the group's task. An episode depends on this, the run's settings and its seed, so
    any process can run it."""

    group_id: str
    task: Task
    member: int
    number: int
    """The member's earlier attempts."""
    plan: SamplingPlan
    branch: Branch | None = None

    @property
    def id(self) -> str:
        """The episode's id. The group is part of it: a small task set may repeat within one step."""
        return f"{self.group_id}:{self.member:03d}:{self.number}"


class Attempts(Protocol):
    """Runs attempts: in this process (`LocalAttempts`), or in several (`envgym.rollout.shards`)."""

    async def run(self, attempt: Attempt, batcher: LockstepBatcher | None = None) -> Episode:
        """The attempt's episode; its requests go through `batcher` in a deterministic run. Raises `WorkerDied` if no
        episode can continue."""

    async def end_group(self, group_id: str) -> None:
        """Release what is held for the branches of a group."""

    async def write(self, write: Callable[[], None]) -> None:
        """Write a file of the run, where that delays this process little. `write` can be pickled, and repeated."""

    async def start(self) -> None:
        """Start what runs them, unless it runs. The first attempt does so too."""

    async def close(self) -> None:
        """End what runs them."""


@dataclass(frozen=True, slots=True)
class _Members:
    """A group's id and task, and what its members have in common: environment, seed (unless each has its own) and
    task's hash."""

    group_id: str
    task: Task
    spec: EnvSpec
    seed: int
    task_hash: str


class LocalAttempts:
    """Runs attempts in this process."""

    def __init__(
        self,
        spec: EnvSpec,
        agent: Agent,
        engine: Engine | ChatEngine | None,
        config: RolloutConfig,
        *,
        max_model_len: int,
        seed: int,
        deterministic: bool,
        forks: bool = True,
    ) -> None:
        """Without `forks` the environments of branches get their parents' actions again."""
        self.spec = spec
        self._agent = agent
        self._engine = engine
        self._config = config
        self._max_model_len = max_model_len
        self._seed = seed
        self._deterministic = deterministic
        self._fingerprints: dict[int, dict[str, str]] = {}
        self._members: _Members | None = None
        self._may_fork = forks
        self._forks: Forks | None = None

    async def run(
        self, attempt: Attempt, batcher: LockstepBatcher | None = None, mark: Callable[[Work], Work] | None = None
    ) -> Episode:
        """See `Attempts.run`. `mark` wraps the agent's run of the episode."""
        task, plan, episode_id = attempt.task, attempt.plan, attempt.id
        members = self._members_of(attempt)
        spec, seed = members.spec, self._env_seed(attempt, members)
        sampler = None
        if self._engine is not None:
            key = (attempt.group_id, task.key, attempt.member, attempt.number)
            sampling_seed = derived_seed(self._seed, *key) if self._deterministic else None
            source = batcher or self._engine
            seconds = self._config.policy_timeout
            settings = (source, episode_id, plan.sampling, self._max_model_len, sampling_seed, seconds)
            branch = attempt.branch
            sampler = EpisodeSampler(*settings) if branch is None else BranchSampler(*settings, branch=branch)
        wrap, make = self._branching(attempt)
        LOCKSTEP.set(batcher)  # for opponents; each episode has a separate asyncio task, and so a separate context

        def run(env: CheckedEnv) -> Work:
            if self._agent.uses_policy:
                return self._agent.run(wrap(env), task, sampler, seed=seed)
            # A replay chooses among demonstrations by its seed, so it must differ between members and purposes.
            replay_seed = derived_seed(seed, episode_id)
            return self._agent.replay(env, task, seed=replay_seed, recording_index=attempt.member)

        work = run if mark is None else lambda env: mark(run(env))
        episode = await run_episode(spec, task, work, self._config.episode_timeout, sampler, make)
        return self._identified(episode, attempt, members, episode_id, seed)

    def _branching(self, attempt: Attempt) -> tuple[Wrap, Callable[[], CheckedEnv] | None]:
        """The environment that an attempt's agent gets in place of an instance, and how that is made (None: anew)."""
        if (branch := attempt.branch) is not None:
            record = self._forks.find(attempt.group_id, branch) if self._forks else None
            make = record.forks[branch.turn - 1].fork if record is not None else None
            return lambda env: RepeatedEnv(env, branch, record), make
        if attempt.plan.branches and self._may_fork:
            forks = self._forks = self._forks or Forks()
            return lambda env: forks.record(env, attempt.group_id, attempt.id), None
        return lambda env: env, None

    async def end_group(self, group_id: str) -> None:
        if self._forks is not None:
            await self._forks.end_group(group_id)

    async def write(self, write: Callable[[], None]) -> None:
        await asyncio.to_thread(write)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def identified(self, episode: Episode, attempt: Attempt) -> Episode:
        """The episode with the fields that its attempt decides."""
        members = self._members_of(attempt)
        return self._identified(episode, attempt, members, attempt.id, self._env_seed(attempt, members))

    def _identified(self, episode: Episode, attempt: Attempt, members: _Members, name: str, seed: int) -> Episode:
        episode.id, episode.env, episode.group_id = name, attempt.task.env or members.spec.id, attempt.group_id
        episode.member, episode.attempt, episode.seed = attempt.member, attempt.number, seed
        episode.fingerprints = {**self._fingerprint(members.spec), "task": members.task_hash}
        if attempt.branch is not None:
            episode.parent, episode.parent_turn = attempt.branch.parent.id, attempt.branch.turn
        return episode

    def _env_seed(self, attempt: Attempt, members: _Members) -> int:
        if attempt.branch is not None:
            return attempt.branch.parent.seed
        if attempt.plan.seed_scope != "episode":
            return members.seed
        return attempt.plan.env_seed(self._seed, attempt.group_id, attempt.task, attempt.member)

    def _members_of(self, attempt: Attempt) -> _Members:
        """The values that a group's members have in common. Cached, since they start one after the other."""
        members, group_id, task = self._members, attempt.group_id, attempt.task
        if members is None or members.group_id != group_id or (members.task is not task and members.task != task):
            seed = attempt.plan.env_seed(self._seed, group_id, task, 0)
            members = self._members = _Members(group_id, task, self.spec.spec_for(task), seed, task_hash(task))
        return members

    def _fingerprint(self, spec: EnvSpec) -> dict[str, str]:
        if id(spec) not in self._fingerprints:
            self._fingerprints[id(spec)] = spec.fingerprint()
        return self._fingerprints[id(spec)]
