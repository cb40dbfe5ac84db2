"""Rolling out: environments times agents times an engine gives episodes, with deadlines and limits.

Whatever goes wrong inside an episode ends that episode, as a failure of a named kind; it never ends the run and
never counts as a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envgym.agent import Agent
from envgym.engine import ChatEngine, Engine, SamplingParams
from envgym.env import CheckedEnv, EnvSpec
from envgym.env.boundary import UsersCode
from envgym.episodes.scores import reward_as_score, withdraw
from envgym.errors import CallTimeout, InvalidOutcome, InvalidStep, PromptTooLong, ResetNeeded, WorkerDied, WorkerError
from envgym.hashing import derived_seed, task_hash
from envgym.loading import users_line
from envgym.processes import cancellation
from envgym.processes.cancellation import StillRunning, run_to_end
from envgym.processes.deadline import Deadline
from envgym.services.policy import WAVES
from envgym.types import Episode, Group, Judgement, Outcome, Span, Task, timed

from .config import RolloutConfig
from .sampler import EpisodeSampler, Waves

Progress = Callable[[int, int, Mapping[str, int]], None]
"""Called at the end of each episode: with the number that have ended, the number of all, and of failures by kind."""


FAILURES: dict[type[Exception], str] = {
    CallTimeout: "timeout",
    PromptTooLong: "prompt_too_long",
    WorkerError: "engine",
    InvalidStep: "invalid_environment",
    ResetNeeded: "invalid_environment",
}
"""Kinds of failed episodes by the errors that end them. Any other error is the environment's."""
STARTED_AT_ONCE = 1024
"""Episodes that start before anything else has its turn, such as a signal that asks to stop."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A way of playing tasks: episodes a task, sampling parameters, and a name that keeps their seeds apart."""

    purpose: str
    sampling: SamplingParams
    samples: int
    """Episodes of each task."""


def group_ids(purpose: str, tasks: Iterable[Task]) -> dict[str, Task]:
    """The tasks of one sampling plan, by the ids of their groups; `Episode.purpose` reads it back."""
    return {f"{purpose}/{index:05d}": task for index, task in enumerate(tasks)}


class Runner:
    """Plays tasks. One runner serves training and evaluation alike."""

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
    ) -> None:
        self.spec = spec
        self.agent = agent
        self.engine = engine
        self.config = config
        self.max_model_len = max_model_len
        self.seed = seed
        self.deterministic = deterministic
        self._fingerprints: dict[int, dict[str, str]] = {}
        self.unscored: set[str] = set()
        """Environments whose rewards are known to be no scores."""
        self._task_hash: tuple[Task | None, str] = (None, "")
        self._slots = asyncio.Semaphore(config.concurrency)
        self._starting = asyncio.Lock()
        """Held by the call of `play` whose members are next to start."""

    async def play(
        self,
        tasks: Sequence[Task],
        plan: SamplingPlan,
        on_progress: Progress | None = None,
        *,
        kept: Mapping[tuple[str, int], Episode] | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Group]:
        """Play every task `plan.samples` times and return the groups in the order of `tasks`.

        All members of a group get the same environment seed, and so the same problem. Failed episodes are in
        the groups, with their outcome. `on_progress` is told of each episode that ends: how many have, of how many
        that are played, and how many failed, by kind.

        Members start as places (`rollout.concurrency`) are free. Episodes `kept` from an earlier call, by their group's
        id and member, are not played again. `on_episode` is given each episode as it ends, and once more where its
        group is judged together or others show that its reward is no score, and that changed it.
        """
        groups = {name: Group(name, task, []) for name, task in group_ids(plan.purpose, tasks).items()}
        kept = {key: old for key, old in (kept or {}).items() if key[0] in groups and key[1] < plan.samples}
        for (name, _), old in kept.items():
            groups[name].episodes.append(old)
        missing = ((g, n) for g in groups.values() for n in range(plan.samples) if (g.id, n) not in kept)
        tally = _Tally(len(groups) * plan.samples - len(kept), on_progress, on_episode)
        await self._play_members(missing, plan, tally)
        played = list(groups.values())
        for group in played:
            group.episodes.sort(key=lambda episode: episode.member)
        judged = await asyncio.gather(*(self.compare(group) for group in played)) if self.agent.uses_policy else []
        changed = {id(episode): episode for episode in itertools.chain(*judged, self.withdraw_scores(played))}
        if on_episode is not None:
            for episode in changed.values():
                on_episode(episode)
        return played

    async def _play_members(self, members: Iterable[tuple[Group, int]], plan: SamplingPlan, tally: _Tally) -> None:
        """Play members of groups, each of which starts as a place is free. Where one raises, the others are ended."""
        waves, slots = None, self._slots  # of all that is played at the same time
        # An API is nobody's batch alone: it is given seeds, and waves would only slow it.
        if self.deterministic and self.engine is not None and not isinstance(self.engine, ChatEngine):
            # A wave waits for every episode in play, so none of these may wait for an environment's own limit.
            most = self.config.concurrency
            concurrency = min(most, self.spec.concurrency_bound() or most)
            waves, slots = Waves(self.engine, tally.total, concurrency), asyncio.Semaphore(concurrency)

        async def play(group: Group, member: int) -> None:
            try:
                episode = await self._play_member(group, member, plan, waves)
            finally:
                if waves is not None:
                    waves.leave()
            group.episodes.append(episode)
            tally.count(episode)

        jobs: set[asyncio.Task[None]] = set()
        ended_badly: list[asyncio.Task[None]] = []

        def end(job: asyncio.Task[None]) -> None:
            slots.release()
            jobs.discard(job)
            if job.cancelled() or job.exception() is not None:
                ended_badly.append(job)

        try:
            async with self._starting:
                for number, (group, member) in enumerate(itertools.takewhile(lambda _: not ended_badly, members)):
                    await slots.acquire()
                    jobs.add(job := asyncio.create_task(play(group, member)))
                    job.add_done_callback(end)
                    if number % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
                        await asyncio.sleep(0)
            await asyncio.gather(*ended_badly, *jobs)
        finally:
            for job in [*jobs]:
                if not job.cancelling():  # a second time would interrupt an environment that is closing
                    job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def withdraw_scores(self, groups: Iterable[Group]) -> list[Episode]:
        """Take back the scores of environments whose rewards are none; returns the episodes that lost theirs."""
        return withdraw((episode for group in groups for episode in group.episodes), self.unscored)

    async def _play_member(self, group: Group, member: int, plan: SamplingPlan, waves: Waves | None) -> Episode:
        """Play a member until an attempt does not fail: each may be retried where the failure may pass, and the group
        as a whole may fill a few places anew."""
        retries = 0
        for attempt in itertools.count():
            episode = await self._play_once(group, member, attempt, plan, waves)
            if not episode.failed or episode.outcome.reason == "prompt_too_long":  # it would be again
                break
            if episode.outcome.retryable and retries < self.config.retries:
                retries += 1
            elif group.refills < self.config.refills:
                group.refills += 1
            else:
                break
            group.lost.append(episode)
        return episode

    async def _play_once(
        self, group: Group, member: int, attempt: int, plan: SamplingPlan, waves: Waves | None
    ) -> Episode:
        task = group.task
        if self._task_hash[0] is not task:  # the members of a group start one after the other
            self._task_hash = (task, task_hash(task))
        hashed = self._task_hash[1]
        spec = self.spec.of(task)
        env_seed = derived_seed(self.seed, task.key)
        # The group is part of the name: a small task set comes round again within one step.
        episode_id = f"{group.id}:{member:03d}:{attempt}"
        sampler = None
        if self.engine is not None:
            sampler = EpisodeSampler(
                waves or self.engine,
                episode_id,
                plan.sampling,
                self.max_model_len,
                derived_seed(self.seed, group.id, task.key, member, attempt) if self.deterministic else None,
            )
        WAVES.set(waves)  # for opponents; each episode has a task, and so a context, of its own
        waiting: list[Span] = []
        start = time.monotonic()
        env: CheckedEnv | None = None
        is_left = False
        episode: Episode | None = None
        try:
            with UsersCode(WorkerDied, StillRunning) as call:  # the engine is gone: no episode can go on
                env = spec.make()
                with timed(waiting, "waiting"):
                    await env.acquire()  # waiting for a place is not the episode's own time
                start = time.monotonic()
                # A replay picks among demonstrations by this seed, so members and purposes must differ in it.
                seed = env_seed if self.agent.uses_policy else derived_seed(env_seed, episode_id)
                if self.agent.uses_policy:
                    playing = self.agent.run(env, task, sampler, seed=seed)
                else:
                    playing = self.agent.replay(env, task, seed=seed, member=member)
                episode = await run_to_end(self._limited(playing, task))
            if episode is None:
                episode = Episode(id="", task=task, outcome=self._failure(call.error, timed_out=False))
        except StillRunning:
            is_left = True
            episode = Episode(id="", task=task, outcome=_left_to_itself(spec))
        finally:
            if is_left and sampler is not None:
                sampler.end()
            if env is not None:
                await self._close(env, is_left)
        episode.id, episode.env, episode.group = episode_id, task.env or spec.id, group.id
        episode.member, episode.attempt = member, attempt
        episode.seed, episode.seconds = env_seed, time.monotonic() - start
        episode.fingerprints = {**self._fingerprint(spec), "task": hashed}
        episode.spans = [*waiting, *(env.spans if env else ()), *(sampler.spans if sampler else ())]
        return episode

    async def _limited(self, playing: Coroutine[Any, Any, Episode], task: Task) -> Episode:
        """The result of `playing` under the episode's deadline: an environment may raise anything at all."""
        deadline = Deadline(self.config.episode_timeout, f"{task.env or self.spec.id}: an episode")
        with UsersCode(WorkerDied) as call:
            async with deadline:
                episode = await playing
            if deadline.expired():  # it was cancelled, and made an answer of that
                raise TimeoutError
            return episode
        return Episode(id="", task=task, outcome=self._failure(call.error, timed_out=deadline.expired()))

    def _fingerprint(self, spec: EnvSpec) -> dict[str, str]:
        if id(spec) not in self._fingerprints:
            self._fingerprints[id(spec)] = spec.fingerprint()
        return self._fingerprints[id(spec)]

    def _failure(self, error: BaseException, *, timed_out: bool) -> Outcome:
        message = str(error) or type(error).__name__
        if timed_out:
            limit = self.config.episode_timeout
            return Outcome.failed("timeout", f"the episode took longer than {limit:g} s", retryable=True)
        if isinstance(error, InvalidOutcome):
            return Outcome.failed(error.kind, message, retryable=error.retryable)
        for expected, kind in FAILURES.items():
            if isinstance(error, expected):
                return Outcome.failed(kind, message, retryable=expected is CallTimeout)
        where = f" ({own})" if (own := users_line(error)) else ""
        message = f"{type(error).__name__}: {message}{where}"
        return Outcome.failed("environment", message, retryable=bool(getattr(error, "retryable", False)))

    async def _close(self, env: CheckedEnv, is_left: bool) -> None:
        """Close it, whatever that raises: the episode is over and its outcome known."""

        async def close() -> None:
            # One that is still at work may well not close either.
            async with Deadline(cancellation.GRACE_SECONDS) if is_left else contextlib.nullcontext():
                await env.close()

        try:
            if env.has_close:
                with UsersCode():
                    await run_to_end(close())
        finally:
            env.leave()

    async def compare(self, group: Group) -> list[Episode]:
        """Let the environment score the finished members of a group against each other, where it does. Returns those
        that it said something of, which may be that they failed."""
        finished = [episode for episode in group.episodes if not episode.failed]
        if not finished:
            return []
        spec = self.spec.of(group.task)
        judging: list[Span] = []
        try:
            with timed(judging, "score"):
                verdicts = await run_to_end(self._verdicts(spec, group, finished))
        except StillRunning:
            verdicts = _left_to_itself(spec)
        if verdicts is None:
            return []
        if isinstance(verdicts, Outcome):
            verdicts = [verdicts] * len(finished)
        for episode, verdict in zip(finished, verdicts, strict=True):
            episode.spans = [*episode.spans, *judging]
            if isinstance(verdict, Judgement):
                apply_judgement(episode, verdict)
            else:
                outcome = verdict if isinstance(verdict, Outcome) else self._failure(verdict, timed_out=False)
                _fail(episode, outcome)
        return finished

    async def _verdicts(
        self, spec: EnvSpec, group: Group, finished: Sequence[Episode]
    ) -> Sequence[Judgement | Exception | Outcome] | Outcome | None:
        """The environment's verdict on each of the finished members, one outcome where judging them failed, or None
        where it judges no groups."""
        deadline = Deadline(self.config.episode_timeout, f"{spec.id}: score_group")
        with UsersCode(WorkerDied) as call:  # a model that judges is gone
            async with deadline:
                judged = await spec.score_group(group.task, finished)
            if judged is None:
                return None
            verdicts = [as_judgement(verdict) for verdict in judged]
            if len(verdicts) != len(finished):
                raise InvalidStep(f"{spec.id}: score_group must say one thing for each of {len(finished)} episodes")
            return verdicts
        return self._failure(call.error, timed_out=deadline.expired())


class _Tally:
    """Counts the episodes that end, and tells who wants to know of each."""

    def __init__(self, total: int, on_progress: Progress | None, on_episode: Callable[[Episode], None] | None) -> None:
        self.total = total
        self._on_progress = on_progress
        self._on_episode = on_episode
        self._done = 0
        self._failures = Counter[str]()

    def count(self, episode: Episode) -> None:
        self._done += 1
        if episode.failed:
            self._failures[episode.outcome.reason] += 1
        if self._on_episode is not None:
            self._on_episode(episode)
        if self._on_progress is not None:
            self._on_progress(self._done, self.total, self._failures)


def _fail(episode: Episode, outcome: Outcome) -> None:
    episode.outcome, episode.reward, episode.score, episode.score_is_reward = outcome, None, None, False


def _left_to_itself(spec: EnvSpec) -> Outcome:
    """That of an episode whose environment cannot be stopped. Not tried again: the next would stay as well."""
    message = f"{spec.id} goes on {cancellation.GRACE_SECONDS:g} s after it was cancelled, and is left to itself"
    return Outcome.failed("does_not_end", message)


def as_judgement(verdict: object) -> Judgement | Exception:
    """The judgement of `score_group` on one episode. Raises `InvalidStep` for what is not a finite number."""
    if isinstance(verdict, Exception):
        return verdict
    judged = verdict if isinstance(verdict, Judgement) else Judgement(verdict)  # type: ignore[arg-type]
    numbers = [judged.reward, judged.score, *judged.metrics.values()]
    try:
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise InvalidStep(f"score_group must give finite numbers, not {verdict!r:.80}")
    except TypeError:
        raise InvalidStep(f"score_group must give numbers, not {verdict!r:.80}") from None
    if judged.score is not None and not 0 <= judged.score <= 1:
        raise InvalidStep(f"score_group gave a score of {judged.score:g}, which is not in [0, 1]")
    return judged


def apply_judgement(episode: Episode, judged: Judgement) -> None:
    """Let a judgement stand in place of what the steps of `episode` paid."""
    own_score = None if episode.score_is_reward or episode.reward is not None else episode.score
    reward = None if judged.reward is None else float(judged.reward)
    for row in episode.rows:
        for turn in row.turns:
            turn.reward = None
    if last := [turn for row in episode.rows for turn in row.turns][-1:]:
        last[0].reward = reward
    episode.reward = reward
    episode.metrics |= {name: float(value) for name, value in judged.metrics.items()}
    score = judged.score if judged.score is not None else own_score
    episode.score = reward_as_score(reward) if score is None else score
    episode.score_is_reward = score is None and episode.score is not None
