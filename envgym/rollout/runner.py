"""Rollouts: an environment, an agent and an engine run episodes, with deadlines and limits.

An error inside an episode ends that episode as a failure of a named kind. It never ends the run, and has a reward only
if `rollout.failed_reward` gives its kind one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envgym.agent import Agent
from envgym.engine import ChatEngine, Engine, SamplingParams
from envgym.env import EnvSpec
from envgym.episodes.scores import apply_reward, as_reward, reward_as_score, reward_failure
from envgym.errors import InvalidStep, WorkerDied
from envgym.hashing import derived_seed
from envgym.processes.cancellation import UsersCode, run_to_end
from envgym.transcript import LockstepBatcher
from envgym.types import Episode, Group, Reward, SeedScope, Span, Status, Task, timed

from .attempts import Attempt, Attempts, LocalAttempts
from .branches import NOT_REPEATED, Branch, choose_branches, rounds
from .config import BranchRule, RolloutConfig
from .episode import failure_of
from .first_answers import FirstAnswers

Progress = Callable[[int, int, Mapping[str, int]], None]
"""Called at the end of each episode, with the number of ended episodes, their total, and failures by kind."""
Member = tuple[Group, int, Branch | None]
"""A group, the number of its member, and the place where that begins (None: at the start)."""
START_BATCH = 1024
"""Number of episodes that start in a row; then the event loop runs other work, such as a signal handler."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The episodes per task, their sampling parameters, and a `purpose`: a name that gives a plan its own ids and
    seeds."""

    purpose: str
    sampling: SamplingParams
    samples: int
    """Episodes per task."""
    seed_scope: SeedScope = "task"
    branches: int = 0
    """Branches per task, of its episodes."""
    branch_at: BranchRule = "evenly"

    def env_seed(self, run_seed: int, group_id: str, task: Task, member: int) -> int:
        """The environment's seed for a member of a group."""
        visit: dict[str, tuple[object, ...]] = {"task": (), "group": (group_id,), "episode": (group_id, member)}
        return derived_seed(run_seed, task.key, *visit[self.seed_scope])


def group_ids(purpose: str, tasks: Iterable[Task]) -> dict[str, Task]:
    """The tasks of one sampling plan by the ids of their groups. `Episode.purpose` reads the purpose back from such an
    id."""
    return {f"{purpose}/{index:05d}": task for index, task in enumerate(tasks)}


class Runner:
    """Rolls out tasks, for training and evaluation alike."""

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
        attempts: Attempts | None = None,
    ) -> None:
        self.spec = spec
        self.agent = agent
        self.engine = engine
        self.config = config
        self.deterministic = deterministic
        self.first_answers = FirstAnswers(spec)
        self.attempts: Attempts = attempts or LocalAttempts(
            spec, agent, engine, config, max_model_len=max_model_len, seed=seed, deterministic=deterministic
        )
        self.unrepeated_envs: set[str] = set()
        """Environments that are not branched any more: with the same actions they differed."""
        self.envs_without_scores: set[str] = set()
        """Environments that have given a reward outside [0, 1]."""
        self._slots = asyncio.Semaphore(config.concurrency)
        self._starting = asyncio.Lock()
        """Held by the call of `roll_out` whose members start next."""

    async def roll_out(
        self,
        tasks: Sequence[Task],
        plan: SamplingPlan,
        on_progress: Progress | None = None,
        *,
        completed: Mapping[tuple[str, int], Episode] | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Group]:
        """Roll out every task `plan.samples` times and return the groups in the order of `tasks`.

        Members of a group get the same environment seed unless `plan.seed_scope` is `episode`. Failed episodes are in
        the groups, with their outcome. `on_progress` is called at the end of each episode.

        Members start as slots (`rollout.concurrency`) become free. Episodes `completed` in an earlier call, by group id
        and member, are not run again. `on_episode` is called with each episode as it ends, and again if group judging
        or the clearing of its score changed it.
        """
        groups, size = group_ids(plan.purpose, tasks), plan.samples + plan.branches
        result = [Group(name, task, []) for name, task in groups.items()]
        completed = {key: e for key, e in (completed or {}).items() if key[0] in groups and key[1] < size}
        for group in result if completed else ():
            group.episodes += [completed[group.id, n] for n in range(size) if (group.id, n) in completed]
        tally = _Tally(len(result) * size - len(completed), on_progress, on_episode)
        # A group's branches start when its first members have ended; in lockstep they wait for those of all groups.
        if not plan.branches or self._lockstep_engine is not None:
            await self._run_groups(result, plan, tally)
        else:
            jobs = [asyncio.create_task(self._run_groups([group], plan, tally)) for group in result]
            try:
                await asyncio.gather(*jobs)
            finally:
                await _cancel(jobs)
        for group in result:
            group.episodes.sort(key=lambda episode: episode.member)
        by_group = await self.score_groups(result) if self.agent.uses_policy else []
        changed = {id(episode): episode for episode in itertools.chain(*by_group, self.withdraw_scores(result))}
        if on_episode is not None:
            for episode in changed.values():
                on_episode(episode)
        return result

    async def _run_groups(self, groups: Sequence[Group], plan: SamplingPlan, tally: _Tally) -> None:
        """Run the missing members of groups, and then, round by round, the missing branches."""
        numbers = range(plan.samples)  # of which there may be too many for a list
        members = ((group, number, None) for group in groups for number in _missing(group, numbers))
        await self._run_members(members, sum(_n_missing(group, numbers) for group in groups), plan, tally)
        if not plan.branches:
            return
        try:
            for rule, place in rounds(plan.branch_at, plan.branches):
                numbers = range(plan.samples + place.start, plan.samples + place.stop)
                branches = [branch for group in groups for branch in self._branches(group, rule, numbers)]
                tally.total += len(branches) - sum(_n_missing(group, numbers) for group in groups)
                await self._run_members(branches, len(branches), plan, tally)
        finally:
            for group in groups:
                await self.attempts.end_group(group.id)

    def _branches(self, group: Group, rule: BranchRule, members: range) -> list[Member]:
        """The missing ones of a group's `members`, which are branches of earlier ones."""
        if (group.task.env or self.spec.id) in self.unrepeated_envs:
            return []
        episodes = sorted((e for e in group.episodes if e.member < members.start), key=lambda episode: episode.member)
        branches = dict(zip(members, choose_branches(episodes, rule, len(members)), strict=False))
        return [(group, member, branches[member]) for member in _missing(group, members) if member in branches]

    @property
    def _lockstep_engine(self) -> Engine | None:
        """The engine of a deterministic run, whose requests are batched in lockstep; else None. A hosted API batches
        them with others, so lockstep cannot make it deterministic: it only gets seeds."""
        return None if not self.deterministic or isinstance(self.engine, ChatEngine) else self.engine

    async def _run_members(self, members: Iterable[Member], count: int, plan: SamplingPlan, tally: _Tally) -> None:
        """Run `count` members of groups, each as soon as a slot is free. If one raises an error, the others are
        cancelled."""
        batcher, slots = None, self._slots  # the slots are those of all concurrent calls
        if (engine := self._lockstep_engine) is not None:
            # A batch waits for every running episode, so none of these may wait for an environment's own limit.
            limit = self.config.concurrency
            concurrency = min(limit, self.spec.concurrency_bound() or limit)
            batcher, slots = LockstepBatcher(engine, count, concurrency), asyncio.Semaphore(concurrency)

        async def run(group: Group, member: int, branch: Branch | None) -> None:
            is_first = branch is None and not self.first_answers.is_over and self.first_answers.start(group.task)
            try:
                episode = await self._run_member(group, member, plan, batcher, branch)
            finally:
                if batcher is not None:
                    batcher.leave()
            if episode.outcome.reason == NOT_REPEATED:
                self._leave_out(group, episode)
            else:
                group.episodes.append(episode)
            tally.count(episode)
            if is_first:
                self.first_answers.add(episode)

        jobs: set[asyncio.Task[None]] = set()
        failed_jobs: list[asyncio.Task[None]] = []

        def end(job: asyncio.Task[None]) -> None:
            slots.release()
            jobs.discard(job)
            if job.cancelled() or job.exception() is not None:
                failed_jobs.append(job)

        try:
            async with self._starting:
                for number, member in enumerate(itertools.takewhile(lambda _: not failed_jobs, members)):
                    await slots.acquire()
                    jobs.add(job := asyncio.create_task(run(*member)))
                    job.add_done_callback(end)
                    if number % START_BATCH == START_BATCH - 1:
                        await asyncio.sleep(0)
            await asyncio.gather(*failed_jobs, *jobs)
        finally:
            await _cancel(jobs)

    def _leave_out(self, group: Group, episode: Episode) -> None:
        """Count a branch whose environment did not repeat its parent's turns, and name that environment once."""
        group.unrepeated += 1
        if episode.env not in self.unrepeated_envs and self.first_answers.note is not None:
            self.first_answers.note(
                f"{episode.env} is not branched any more (rollout.branches), since it does not repeat: "
                f"{episode.outcome.message}"
            )
        self.unrepeated_envs.add(episode.env)

    async def score_groups(self, groups: Iterable[Group]) -> list[list[Episode]]:
        """Let environments judge each group as a whole (`score_group`). Returns the changed episodes of each group."""
        if not self.spec.scores_groups:
            return []
        seconds = self.config.episode_timeout
        scored = await asyncio.gather(*(score_group(self.spec, group, seconds) for group in groups))
        for episode in itertools.chain(*scored):
            reward_failure(episode, self.config.failed_reward)
        return scored

    def withdraw_scores(self, groups: Iterable[Group]) -> list[Episode]:
        """Clear reward-derived scores in environments that have given a reward outside [0, 1], in this call or before:
        otherwise a game with the rewards 1 and -1 would have scores of its winners only. Returns the changed episodes.
        Those of earlier calls keep their scores."""
        finished = [episode for group in groups for episode in group.episodes if episode.is_counted]
        unscored = [episode for episode in finished if episode.score is None and episode.reward is not None]
        self.envs_without_scores |= {episode.env for episode in unscored if reward_as_score(episode.reward) is None}
        changed = [e for e in finished if e.score_is_reward and e.env in self.envs_without_scores]
        for episode in changed:
            episode.score, episode.score_is_reward = None, False
        return changed

    async def _run_member(
        self, group: Group, member: int, plan: SamplingPlan, batcher: LockstepBatcher | None, branch: Branch | None
    ) -> Episode:
        """Run a member until an attempt succeeds: transient failures are retried per member, and each group may replace
        a few others (`rollout.refills`)."""
        retries = 0
        for number in itertools.count():
            episode = await self.attempts.run(Attempt(group.id, group.task, member, number, plan, branch), batcher)
            if episode.outcome.status is not Status.FAILED or episode.outcome.reason == NOT_REPEATED:
                break
            reward_failure(episode, self.config.failed_reward)
            # Every attempt has the same prompt, so one that is too long stays too long.
            if episode.is_counted or episode.outcome.reason == "prompt_too_long":
                break
            if episode.outcome.retryable and retries < self.config.retries:
                retries += 1
            elif group.refills < self.config.refills:
                group.refills += 1
            else:
                break
            group.superseded.append(episode)
        return episode


def _missing(group: Group, members: range) -> Iterator[int]:
    numbers = {episode.member for episode in group.episodes}
    return (member for member in members if member not in numbers)


def _n_missing(group: Group, members: range) -> int:
    return len(members) - len({episode.member for episode in group.episodes if episode.member in members})


async def _cancel(jobs: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    for job in [*jobs]:
        if not job.cancelling():  # a second cancellation would interrupt an environment that is closing
            job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


class _Tally:
    """Counts ended episodes and calls the callbacks for each."""

    def __init__(self, total: int, on_progress: Progress | None, on_episode: Callable[[Episode], None] | None) -> None:
        self.total = total
        self._on_progress = on_progress
        self._on_episode = on_episode
        self._n_episodes = 0
        self._failures = Counter[str]()

    def count(self, episode: Episode) -> None:
        self._n_episodes += 1
        if episode.outcome.status is Status.FAILED:
            self._failures[episode.outcome.reason] += 1
        if self._on_episode is not None:
            self._on_episode(episode)
        if self._on_progress is not None:
            self._on_progress(self._n_episodes, self.total, self._failures)


async def score_group(spec: EnvSpec, group: Group, timeout: float) -> list[Episode]:
    """Call the environment's `score_group` on the finished members of a group, limited to `timeout` seconds. Returns
    the episodes it changed, including those it marked failed; none if the environment judges no groups."""
    finished = [episode for episode in group.episodes if not episode.failed]
    if not finished:
        return []
    spec = spec.spec_for(group.task)
    judging: list[Span] = []
    verdicts: Sequence[Reward | BaseException] | None = None
    with UsersCode(WorkerDied) as call, timed(judging, "score"):  # raised if a judge model is gone
        work = _verdicts(spec, group.task, finished)
        verdicts = await run_to_end(work, timeout, f"{spec.id}: score_group", WorkerDied)
        if verdicts is None:
            return []
    if verdicts is None:
        verdicts = [call.error] * len(finished)
    for episode, verdict in zip(finished, verdicts, strict=True):
        episode.spans = [*episode.spans, *judging]
        if isinstance(verdict, Reward):
            apply_reward(episode, verdict)
        else:
            episode.outcome = failure_of(spec, verdict)
            episode.reward, episode.score, episode.score_is_reward = None, None, False
    return finished


async def _verdicts(spec: EnvSpec, task: Task, finished: list[Episode]) -> list[Reward | Exception] | None:
    """The environment's verdict on each finished member; None if it judges no groups."""
    verdicts = await spec.score_group(task, finished)
    if verdicts is None:
        return None
    if len(verdicts) != len(finished):
        raise InvalidStep(f"{spec.id}: score_group must return one verdict per episode, so {len(finished)}")
    return [as_reward(verdict) for verdict in verdicts]
