"""The controller's end of the processes that roll out (`rollout.processes`): attempts are dealt out to them, and those
of a process that dies are run again in another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envgym.engine import ChatEngine, Engine, Generation, Request
from envgym.engines.pool import EnginePool
from envgym.env.marks import may_have_ended
from envgym.errors import ConfigError, EnvgymError, NameNotFound, WorkerDied, WorkerError
from envgym.processes.callbacks import answer_calls, call_with_answers
from envgym.processes.runtime import WorkerHandle
from envgym.processes.supervisor import Supervisor
from envgym.services.policy import LOCKSTEP
from envgym.services.start import with_parts
from envgym.transcript import LockstepBatcher
from envgym.types import Episode, Outcome, Span, Task

from .attempts import Attempt, LocalAttempts
from .runner import SamplingPlan
from .shard import ENGINE, POOL, POOLS_SUBJECT, RolloutShard, ShardSpec

MOST_CRASHES = 3
"""Deaths of processes during one attempt, that its code may have caused, after which it has failed."""
EPISODES_PER_DEATH = 100
"""Episodes that have ended for each death, with which deaths are not too many."""
PING_SECONDS = 30.0
"""Seconds between two checks that a process answers."""


@dataclass(eq=False, slots=True)
class _Shard:
    """A living process, its id, and the attempts that run in it by their groups."""

    number: int
    handle: WorkerHandle[RolloutShard]
    pid: int
    tasks: tuple[asyncio.Task[None], ...]
    """Answer what it asks for all its episodes, and watch whether it answers."""
    groups: dict[str, int] = field(default_factory=dict)
    load: int = 0
    """The number of these attempts, and of files that it writes."""


class Shards(Supervisor[_Shard]):
    """Runs attempts in `count` processes; `start` starts the worker of a number. Members of one group run in one
    process, which has their common prefix; a group in the process with the fewest running attempts.

    The environment's slots are those of `local`, which runs nothing. The process's engines are those of `engine`.
    """

    def __init__(
        self,
        start: Callable[[int, ShardSpec], Awaitable[WorkerHandle[RolloutShard]]],
        count: int,
        shard: ShardSpec,
        local: LocalAttempts,
        engine: Engine | ChatEngine | None,
        note: Callable[[str], None],
    ) -> None:
        super().__init__("processes that roll out", count, note)
        self._marks = tempfile.TemporaryDirectory(prefix="envgym-marks-")
        clients = {
            f"{index}/{name}": client
            for index, part in enumerate(with_parts(local.spec))
            for name, client in part.clients.items()
        }
        is_direct = isinstance(engine, EnginePool) and not shard.deterministic
        self._shard = replace(
            shard,
            engines=len(engine.clients) if isinstance(engine, EnginePool) and is_direct else 0,
            is_chat=isinstance(engine, ChatEngine),
            services=(*clients,),
            marks=Path(self._marks.name),
            seals=not local.spec.scores_groups,
        )
        self._start, self._local = start, local
        self._pool = {POOL: engine} if is_direct else {}
        self._objects: Mapping[str, Any] = clients if is_direct or engine is None else {**clients, ENGINE: engine}
        self._last_common: tuple[Task, SamplingPlan, bytes] | None = None
        self._last_shard: _Shard | None = None
        self._numbers = itertools.count(POOLS_SUBJECT + 1)
        self._starting: asyncio.Task[None] | None = None
        self._n_episodes = 0

    async def start(self) -> None:
        """Start the processes that do not run yet. Raises `EnvgymError` if they cannot be set up."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_all())
        await asyncio.shield(self._starting)

    async def close(self) -> None:
        """Close all processes."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._stop_replacing()
        shards, self.members, self._starting = self.members, [], None
        await asyncio.gather(*(self._close_shard(shard) for shard in shards))
        self._marks.cleanup()

    async def run(self, attempt: Attempt, batcher: LockstepBatcher | None = None) -> Episode:
        """See `Attempts.run`. An attempt whose code ends its process several times has failed (`crash`)."""
        if not self.members:
            await self.start()
        LOCKSTEP.set(batcher)  # for the services that this process calls for the attempt
        repeating = None if batcher is None else _Repeating(batcher)
        objects = self._objects if repeating is None else {**self._objects, ENGINE: repeating}
        try:
            return await self._run_to_end(attempt, objects)
        finally:
            if repeating is not None:
                repeating.close()

    async def _run_to_end(self, attempt: Attempt, objects: Mapping[str, Any]) -> Episode:
        """Run an attempt in one process after the other until it ends in one."""
        spec, waiting_start = self._local.spec.spec_for(attempt.task), time.time()
        async with spec.slots or contextlib.nullcontext():
            waiting: Span = ("waiting", round(waiting_start, 4), round(time.time(), 4))
            n_crashes = 0
            while True:
                try:
                    episode = await self._run_in(await self._shard_of(attempt.group_id), attempt, waiting, objects)
                    break
                except _Crash as crash:
                    n_crashes += crash.may_be_its_code
                    if n_crashes == MOST_CRASHES:
                        outcome = Outcome.fail("crash", str(crash), retryable=True)
                        episode = self._local.identified(Episode("", attempt.task, outcome), attempt)
                        break
        self._n_episodes += 1
        return episode

    async def end_group(self, group_id: str) -> None:
        pass

    async def write(self, write: Callable[[], None]) -> None:
        """See `Attempts.write`."""
        while True:
            shard = await self._shard_of("")
            shard.load += 1
            try:
                return await shard.handle.call(lambda worker: worker.write(write))
            except WorkerDied as death:
                self._lose(shard, str(death))
            finally:
                shard.load -= 1

    async def _run_in(self, shard: _Shard, attempt: Attempt, waiting: Span, objects: Mapping[str, Any]) -> Episode:
        """Run an attempt in a process. Raises `_Crash` if that dies."""
        subject, groups = next(self._numbers), shard.groups
        groups[attempt.group_id] = groups.get(attempt.group_id, 0) + 1
        shard.load += 1
        common, start = self._common(attempt), (subject, attempt.group_id, attempt.member, attempt.number, waiting)
        try:
            result = await call_with_answers(
                shard.handle, subject, objects, lambda worker: worker.run(*start, common, attempt.branch)
            )
        except WorkerDied as death:
            self._lose(shard, str(death))
            may_be_its_code = may_have_ended(Path(self._marks.name), shard.pid, subject)
            raise _Crash(str(death), may_be_its_code=may_be_its_code) from None
        except WorkerError as error:  # an episode that cannot be sent
            outcome = Outcome.fail("environment", str(error))
            return self._local.identified(Episode("", attempt.task, outcome), attempt)
        finally:
            shard.load -= 1
            groups[attempt.group_id] -= 1
            if not groups[attempt.group_id]:
                del groups[attempt.group_id]
        if isinstance(result, str):
            raise WorkerDied(result)
        result.task = result.task or attempt.task
        return result

    def _common(self, attempt: Attempt) -> bytes:
        """The pickled task and plan of an attempt's group, whose members start one after the other."""
        task, plan, data = self._last_common or (None, None, b"")
        if task is not attempt.task or plan is not attempt.plan:
            data = pickle.dumps((attempt.task, attempt.plan), protocol=5)
            self._last_common = attempt.task, attempt.plan, data
        return data

    async def _shard_of(self, group_id: str) -> _Shard:
        """The process for an attempt of a group. Waits for a replacement while none is alive; raises the error for
        which there will be none."""
        if self._broken is not None:  # what still lives does not last
            raise self._broken
        if (last := self._last_shard) is None or group_id not in last.groups or last not in self.members:
            live = self.members or await self._live_members()
            members = [shard for shard in live if group_id in shard.groups]
            last = self._last_shard = members[0] if members else min(live, key=lambda shard: shard.load)
        return last

    # -- starts and deaths ---------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        starting = (self._start_shard(number) for number in range(self._count))
        results = await asyncio.gather(*starting, return_exceptions=True)
        self.members = [shard for shard in results if isinstance(shard, _Shard)]
        for error in [result for result in results if isinstance(result, BaseException)]:
            if isinstance(error, NameNotFound):
                raise ConfigError(
                    f"rollout.processes: another process cannot make the environment or the agent ({error}): define it "
                    "in a file or a module, and give that"
                )
            raise error

    async def _start_shard(self, number: int) -> _Shard:
        handle = await self._start(number, self._shard)
        answering = asyncio.create_task(answer_calls(handle, POOLS_SUBJECT, self._pool))
        subject = next(self._numbers)
        try:
            pid = await call_with_answers(handle, subject, self._objects, lambda worker: worker.setup(subject))
        except BaseException:
            answering.cancel()
            await handle.close()
            raise
        return _Shard(number, handle, pid, (answering, asyncio.create_task(self._watch(handle))))

    async def _close_shard(self, shard: _Shard) -> None:
        for task in shard.tasks:
            task.cancel()
        await shard.handle.close()

    async def _watch(self, handle: WorkerHandle[RolloutShard]) -> None:
        """Kill a process whose event loop an environment has blocked for longer than an episode may take."""
        with contextlib.suppress(EnvgymError):  # it has died by itself
            try:
                while True:
                    await asyncio.sleep(PING_SECONDS)
                    async with asyncio.timeout(self._shard.config.episode_timeout):
                        await handle.run(lambda shard: shard.answer_ping())
            except TimeoutError:
                await handle.kill()

    async def _start_again(self, member: _Shard) -> _Shard:
        await self._close_shard(member)
        return await self._start_shard(member.number)

    def _die_too_often(self) -> bool:
        return super()._die_too_often() and self._n_episodes < EPISODES_PER_DEATH * self.deaths


class _Repeating:
    """The engine of one attempt in lockstep. An attempt that is run again, since its process died, gets the answers of
    the first time, and its request that waits for a batch is in that batch: no other episode sees a difference."""

    def __init__(self, batcher: LockstepBatcher) -> None:
        self._batcher = batcher
        self._generating: dict[str, asyncio.Task[Generation]] = {}

    async def generate(self, request: Request) -> Generation:
        if request.id not in self._generating:
            self._generating[request.id] = asyncio.create_task(self._batcher.generate(request))
        return await asyncio.shield(self._generating[request.id])

    def close(self) -> None:
        """Stop waiting: the attempt has ended."""
        for task in self._generating.values():
            task.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())


class _Crash(Exception):
    """A process has died while it ran an attempt."""

    def __init__(self, message: str, *, may_be_its_code: bool) -> None:
        super().__init__(message)
        self.may_be_its_code = may_be_its_code
