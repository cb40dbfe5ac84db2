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
from typing import Any, TypeVar

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
from envgym.services.policy import LOCKSTEP
from envgym.types import Episode, Group, Outcome, Reward, Span, Task, timed

from .config import RolloutConfig
from .sampler import EpisodeSampler, LockstepBatcher

T = TypeVar("T")
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
        judged = await self.compare(played) if self.agent.uses_policy else []
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
            waves, slots = LockstepBatcher(self.engine, tally.total, concurrency), asyncio.Semaphore(concurrency)

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

    async def compare(self, groups: Iterable[Group]) -> list[list[Episode]]:
        """Let environments judge groups that they judge together. Returns the episodes that they said something of."""
        seconds = self.config.episode_timeout
        return await asyncio.gather(*(compare(self.spec, group, seconds) for group in groups))

    def withdraw_scores(self, groups: Iterable[Group]) -> list[Episode]:
        """Take back the scores of environments whose rewards are none; returns the episodes that lost theirs."""
        return withdraw((episode for group in groups for episode in group.episodes), self.unscored)

    async def _play_member(
        self, group: Group, member: int, plan: SamplingPlan, waves: LockstepBatcher | None
    ) -> Episode:
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
            group.superseded.append(episode)
        return episode

    async def _play_once(
        self, group: Group, member: int, attempt: int, plan: SamplingPlan, waves: LockstepBatcher | None
    ) -> Episode:
        task, spec = group.task, self.spec.spec_for(group.task)
        if self._task_hash[0] is not task:  # the members of a group start one after the other
            self._task_hash = (task, task_hash(task))
        fingerprint = self._task_hash[1]
        # The group is part of the name: a small task set comes round again within one step.
        episode_id = f"{group.id}:{member:03d}:{attempt}"
        seed = derived_seed(self.seed, task.key)
        sampler = None
        if self.engine is not None:
            sampling_seed = derived_seed(self.seed, group.id, task.key, member, attempt) if self.deterministic else None
            sampler = EpisodeSampler(waves or self.engine, episode_id, plan.sampling, self.max_model_len, sampling_seed)
        LOCKSTEP.set(waves)  # for opponents; each episode has a task, and so a context, of its own

        def play(env: CheckedEnv) -> Coroutine[Any, Any, Episode]:
            if self.agent.uses_policy:
                return self.agent.run(env, task, sampler, seed=seed)
            # A replay picks among demonstrations by its seed, so members and purposes must differ in it.
            return self.agent.replay(env, task, seed=derived_seed(seed, episode_id), recording_index=member)

        episode = await play_episode(self.spec, task, play, self.config.episode_timeout, sampler)
        episode.id, episode.env, episode.group_id = episode_id, task.env or spec.id, group.id
        episode.member, episode.attempt, episode.seed = member, attempt, seed
        episode.fingerprints = {**self._fingerprint(spec), "task": fingerprint}
        return episode

    def _fingerprint(self, spec: EnvSpec) -> dict[str, str]:
        if id(spec) not in self._fingerprints:
            self._fingerprints[id(spec)] = spec.fingerprint()
        return self._fingerprints[id(spec)]


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


async def play_episode(
    spec: EnvSpec,
    task: Task,
    play: Callable[[CheckedEnv], Coroutine[Any, Any, Episode]],
    timeout: float,
    sampler: EpisodeSampler | None = None,
) -> Episode:
    """The episode that `play` makes of a new instance within `timeout` seconds. The instance is closed.

    Whatever goes wrong is its outcome. It has no id yet, and was not judged with others. Raises `WorkerDied`: the
    engine is gone, and no episode can go on.
    """
    spec, name = spec.spec_for(task), task.env or spec.id
    env: CheckedEnv | None = None
    result: Episode | Outcome | None = None
    waiting: list[Span] = []
    start = time.monotonic()
    with UsersCode(WorkerDied) as call:
        env = spec.make()
        async with _Closing(env, sampler):
            with timed(waiting, "waiting"):
                await env.acquire()
            start = time.monotonic()  # waiting for a place is not the episode's own time
            result = await run_to_end(_in_time(spec, play(env), timeout, f"{name}: an episode"))
    if result is None:
        result = _failure(spec, call.error)
    episode = Episode(id="", task=task, outcome=result) if isinstance(result, Outcome) else result
    episode.seconds = time.monotonic() - start
    episode.spans = [*waiting, *(env.spans if env else ()), *(sampler.spans if sampler else ())]
    return episode


class _Closing:
    """Closes an instance at the end of its `async with`, whatever that raises: the outcome is known by then. What goes
    on after its end samples no more."""

    def __init__(self, env: CheckedEnv, sampler: EpisodeSampler | None) -> None:
        self._env = env
        self._sampler = sampler

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        goes_on = isinstance(error, StillRunning)
        if goes_on and self._sampler is not None:
            self._sampler.end()
        try:
            if self._env.has_close:
                with UsersCode():
                    await run_to_end(self._close(goes_on))
        finally:
            self._env.release()

    async def _close(self, goes_on: bool) -> None:
        # One that is still at work may well not close either.
        async with Deadline(cancellation.GRACE_SECONDS) if goes_on else contextlib.nullcontext():
            await self._env.close()


async def compare(spec: EnvSpec, group: Group, timeout: float) -> list[Episode]:
    """Let the environment score the finished members of a group against each other, where it does, within `timeout`
    seconds. Returns those that it said something of, which may be that they failed."""
    finished = [episode for episode in group.episodes if not episode.failed]
    if not finished:
        return []
    spec = spec.spec_for(group.task)
    judging: list[Span] = []
    try:
        with timed(judging, "score"):
            judged = _verdicts(spec, group.task, finished)
            verdicts = await run_to_end(_in_time(spec, judged, timeout, f"{spec.id}: score_group"))
    except StillRunning as error:
        verdicts = _failure(spec, error)
    if verdicts is None:
        return []
    of_each = [verdicts] * len(finished) if isinstance(verdicts, Outcome) else verdicts
    for episode, verdict in zip(finished, of_each, strict=True):
        episode.spans = [*episode.spans, *judging]
        if isinstance(verdict, Reward):
            apply_judgement(episode, verdict)
        else:
            episode.outcome = verdict if isinstance(verdict, Outcome) else _failure(spec, verdict)
            episode.reward, episode.score, episode.score_is_reward = None, None, False
    return finished


async def _verdicts(spec: EnvSpec, task: Task, finished: list[Episode]) -> list[Reward | Exception] | None:
    """The environment's verdict on each of the finished members, or None where it judges no groups."""
    judged = await spec.score_group(task, finished)
    if judged is not None and len(judged) != len(finished):
        raise InvalidStep(f"{spec.id}: score_group must say one thing for each of {len(finished)} episodes")
    return None if judged is None else [as_judgement(verdict) for verdict in judged]


async def _in_time(spec: EnvSpec, work: Coroutine[Any, Any, T], seconds: float, name: str) -> T | Outcome:
    """The result of users' code, which may raise anything at all, or the failure that it is."""
    deadline = Deadline(seconds, name)
    with UsersCode(WorkerDied) as call:  # the engine, or a model that judges, is gone
        async with deadline:
            result = await work
        if deadline.expired():  # it was cancelled, and made an answer of that
            raise TimeoutError
        return result
    if deadline.expired():
        return Outcome.fail("timeout", f"the episode took longer than {seconds:g} s", retryable=True)
    return _failure(spec, call.error)


def _failure(spec: EnvSpec, error: BaseException) -> Outcome:
    """The outcome of an episode that ended in `error`."""
    message = str(error) or type(error).__name__
    if isinstance(error, StillRunning):  # not tried again: the next would go on as well
        grace = cancellation.GRACE_SECONDS
        message = f"{spec.id} goes on {grace:g} s after it was cancelled, and is left to itself"
        return Outcome.fail("does_not_end", message)
    if isinstance(error, InvalidOutcome):
        return Outcome.fail(error.kind, message, retryable=error.retryable)
    for expected, kind in FAILURES.items():
        if isinstance(error, expected):
            return Outcome.fail(kind, message, retryable=expected is CallTimeout)
    where = f" ({line})" if (line := users_line(error)) else ""
    message = f"{type(error).__name__}: {message}{where}"
    return Outcome.fail("environment", message, retryable=bool(getattr(error, "retryable", False)))


def as_judgement(verdict: object) -> Reward | Exception:
    """The judgement of `score_group` on one episode. Raises `InvalidStep` for what is not a finite number."""
    if isinstance(verdict, Exception):
        return verdict
    judged = verdict if isinstance(verdict, Reward) else Reward(verdict)  # type: ignore[arg-type]
    numbers = [judged.reward, judged.score, *judged.metrics.values()]
    try:
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise InvalidStep(f"score_group must give finite numbers, not {verdict!r:.80}")
    except TypeError:
        raise InvalidStep(f"score_group must give numbers, not {verdict!r:.80}") from None
    if judged.score is not None and not 0 <= judged.score <= 1:
        raise InvalidStep(f"score_group gave a score of {judged.score:g}, which is not in [0, 1]")
    return judged


def apply_judgement(episode: Episode, judged: Reward) -> None:
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
