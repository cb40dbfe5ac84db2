"""Rolling out: environments times agents times an engine gives episodes, with deadlines and limits.

Whatever goes wrong inside an episode ends that episode, as a failure of a named kind; it never ends the run and
never counts as a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .agent import Agent
from .config import RolloutConfig
from .engines.base import Engine, SamplingParams
from .env import CheckedEnv, EnvSpec
from .errors import InvalidStep, PromptTooLong, ResetNeeded, WorkerDied, WorkerError
from .sampler import EpisodeSampler, Waves, derived_seed
from .types import Episode, Group, Outcome, Task


@dataclass(frozen=True, slots=True)
class Play:
    """One way of playing: what to sample with, and a name that keeps its episodes' seeds apart."""

    purpose: str
    sampling: SamplingParams
    group_size: int


class Runner:
    """Plays tasks. One runner serves training and evaluation alike."""

    def __init__(
        self,
        spec: EnvSpec,
        agent: Agent,
        engine: Engine | None,
        config: RolloutConfig,
        *,
        max_model_len: int,
        seed: int,
        deterministic: bool,
    ) -> None:
        self.spec = spec
        self.agent = agent
        self.engine = engine
        self.config = config
        self.max_model_len = max_model_len
        self.seed = seed
        self.deterministic = deterministic

    async def play(
        self, tasks: Sequence[Task], play: Play, on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """Play every task `group_size` times and return the groups in the order of `tasks`.

        All members of a group get the same environment seed, and so the same problem. Failed episodes are in
        the groups, with their outcome. `on_progress` is told of each episode that ends: how many have, of how many.
        """
        done, total = 0, len(tasks) * play.group_size
        slots = asyncio.Semaphore(self.config.concurrency)
        waves = None
        if self.deterministic and self.engine is not None:
            waves = Waves(self.engine, total, self.config.concurrency)

        async def one(group: Group, member: int) -> Episode:
            nonlocal done
            async with slots:
                try:
                    episode = await self._with_retries(group, member, play, waves)
                finally:
                    if waves is not None:
                        waves.leave()
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
                return episode

        groups = [Group(f"{play.purpose}/{index:05d}", task, []) for index, task in enumerate(tasks)]
        jobs = [asyncio.create_task(one(group, member)) for group in groups for member in range(play.group_size)]
        try:
            episodes = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                if not job.cancelling():  # a second time would interrupt an environment that is closing
                    job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        for index, group in enumerate(groups):
            group.episodes = episodes[index * play.group_size : (index + 1) * play.group_size]
        await asyncio.gather(*(self._judge(group) for group in groups))
        return groups

    async def _with_retries(self, group: Group, member: int, play: Play, waves: Waves | None) -> Episode:
        for attempt in range(self.config.retries + 1):
            episode = await self._play_once(group, member, attempt, play, waves)
            if not (episode.failed and episode.outcome.retryable):
                break
        return episode

    async def _play_once(self, group: Group, member: int, attempt: int, play: Play, waves: Waves | None) -> Episode:
        task = group.task
        env_seed = derived_seed(self.seed, task.id)
        # The group is part of the name: a small task set comes round again within one step.
        episode_id = f"{group.id}:{member:03d}:{attempt}"
        sampler = None
        if self.engine is not None:
            sampler = EpisodeSampler(
                waves or self.engine,
                episode_id,
                play.sampling,
                self.max_model_len,
                derived_seed(self.seed, group.id, task.id, member, attempt) if self.deterministic else None,
            )
        start = time.monotonic()
        env: CheckedEnv | None = None
        deadline = asyncio.timeout(self.config.episode_timeout)
        try:
            async with deadline:
                env = self.spec.make()
                # A replay picks among demonstrations by this seed, so members and purposes must differ in it.
                seed = env_seed if self.agent.samples else derived_seed(env_seed, episode_id)
                episode = await self.agent.run(env, task, sampler, seed=seed)
        except (WorkerDied, asyncio.CancelledError):
            raise  # the engine is gone, or the run is ending: no episode can go on
        except Exception as error:  # an environment may raise anything at all
            episode = Episode(id="", task=task, outcome=self._failure(error, timed_out=deadline.expired()))
        finally:
            if env is not None:
                await self._close(env)
        episode.id, episode.env, episode.group = episode_id, self.spec.id, group.id
        episode.member, episode.attempt = member, attempt
        episode.seed, episode.seconds = env_seed, time.monotonic() - start
        return episode

    def _failure(self, error: Exception, *, timed_out: bool) -> Outcome:
        message = str(error) or type(error).__name__
        if timed_out:
            limit = self.config.episode_timeout
            return Outcome.failed("timeout", f"the episode took longer than {limit:g} s", retryable=True)
        if isinstance(error, PromptTooLong):
            return Outcome.failed("prompt_too_long", message)
        if isinstance(error, WorkerError):
            return Outcome.failed("engine", message)
        if isinstance(error, InvalidStep | ResetNeeded):
            return Outcome.failed("invalid_environment", message)
        return Outcome.failed(
            "environment", f"{type(error).__name__}: {message}", retryable=bool(getattr(error, "retryable", False))
        )

    async def _close(self, env: CheckedEnv) -> None:
        with contextlib.suppress(Exception):  # the episode is over and its outcome known: this changes nothing
            async with asyncio.timeout(self.config.episode_timeout):
                await env.close()

    async def _judge(self, group: Group) -> None:
        """Let the environment score the finished members of a group against each other, where it does."""
        finished = [episode for episode in group.episodes if not episode.failed]
        if not finished:
            return
        deadline = asyncio.timeout(self.config.episode_timeout)
        try:
            async with deadline:
                judged = await self.spec.score_group(group.task, finished)
            rewards = None if judged is None else [float(reward) for reward in judged]
            if rewards is not None and not (len(rewards) == len(finished) and all(map(math.isfinite, rewards))):
                raise InvalidStep(f"{self.spec.id}: score_group must return a finite number for each episode")
        except WorkerDied:
            raise  # a model that judges is gone
        except Exception as error:
            for episode in finished:
                episode.outcome = self._failure(error, timed_out=deadline.expired())
                episode.reward = episode.score = None
            return
        for episode, reward in zip(finished, rewards or (), strict=bool(rewards)):
            episode.reward = reward
            episode.score = episode.score if episode.score is not None else (reward if 0 <= reward <= 1 else None)
