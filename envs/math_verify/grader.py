"""Grades answers in processes that can be killed: an answer that hangs costs its deadline and nothing else."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from envgym.errors import CallTimeout, InvalidOutcome, WorkerDied
from envgym.processes.pool import Processes

from .answers import looks_costly

HOST = "envgym.envs.math_verify.worker:Worker"
CACHE_SIZE = 4096
SLICE = 0.25
"""Seconds of CPU time that every answer gets at once; most take a tenth of it. What needs more starts again among the
costly, with four times as much, and then once more without a limit but the deadline: nobody waits longer than a
slice for the answer of another."""
PATIENCE = 3
"""Deadlines that a costly answer may wait for its turn: hundreds of hostile ones hold a step up for so long, not
for a deadline each."""
GRACE_SECONDS = 10.0
"""Time past the deadline of an answer after which a process that does not report it is killed."""
_LOW_PRIORITY = 10

Question = tuple[str, str, str]
"""Answer, reference, problem."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The grade of an answer; `failure` is `timeout` where grading it ran out of time, or never had its turn behind
    others that did, and `crash` where it killed the process twice."""

    correct: bool
    failure: Literal["", "timeout", "crash"] = ""


class Grader:
    """Pools of grading processes, started when first needed.

    Answers that have used up their slice, and those that look as if they would, wait for a process of their own, of low
    priority, and those that have used up a longer one for another, so that hundreds of hostile ones delay none of the
    others. `timeout` is in seconds, for one answer. The pools live on a loop and thread of their own, so that a grader
    outlives the loop that first used it.
    """

    def __init__(self, processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._counts = (processes, 1, 1)
        self._turns = [asyncio.Semaphore(count) for count in self._counts]
        self._starting = [asyncio.Lock() for _ in self._counts]
        self._pools: dict[int, Processes] = {}
        self._grading: dict[Question, asyncio.Task[Verdict]] = {}
        self._verdicts: dict[Question, Verdict] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grader", daemon=True)
        self._thread.start()

    async def grade(self, answer: str, gold: str, problem: str = "") -> Verdict:
        """Grade an answer to `problem` against `gold`. Equal questions share one grading; the last thousands are kept.

        Raises `WorkerError` where grading processes do not start, or the grader is closed.
        """
        asked: Future[Verdict] = asyncio.run_coroutine_threadsafe(self._shared((answer, gold, problem)), self._loop)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if self._closed and asked.cancelled():
                raise WorkerDied("the grader was closed") from None
            raise

    async def close(self) -> None:
        """Kill the processes; gradings still under way raise `WorkerDied`."""
        self._closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the loop of its own ---------------------------------------------------------------------------

    async def _end(self) -> None:
        grading = list(self._grading.values())
        for task in grading:
            task.cancel()
        await asyncio.gather(*grading, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _shared(self, key: Question) -> Verdict:
        if key in self._verdicts:
            self._verdicts[key] = verdict = self._verdicts.pop(key)  # the latest of all
            return verdict
        if key not in self._grading:
            task = self._grading[key] = asyncio.create_task(self._graded(*key))
            task.add_done_callback(lambda done: self._keep(key, done))
        # Shielded: one who no longer waits must not take the verdict from the others.
        return await asyncio.shield(self._grading[key])

    def _keep(self, key: Question, done: asyncio.Task[Verdict]) -> None:
        del self._grading[key]
        if not done.cancelled() and done.exception() is None and not done.result().failure:
            self._verdicts[key] = done.result()
            if len(self._verdicts) > CACHE_SIZE:
                del self._verdicts[next(iter(self._verdicts))]

    async def _graded(self, answer: str, gold: str, problem: str) -> Verdict:
        """Have an answer graded: in its slice, or in a longer one, or by the deadline."""
        give_up = math.inf
        for lane, cpu in enumerate((SLICE, 4 * SLICE, 0.0)):
            if lane == 0 and looks_costly(answer):
                continue
            if lane and math.isinf(give_up):
                give_up = time.monotonic() + PATIENCE * self._timeout
            async with self._turns[lane]:
                if time.monotonic() > give_up:
                    break
                verdict = await self._ask(lane, (answer, gold, problem), cpu)
            if verdict is not None:
                return verdict
        return Verdict(False, "timeout")

    async def _ask(self, lane: int, question: Question, cpu: float) -> Verdict | None:
        """The verdict, or None where the answer takes more than `cpu` seconds of CPU time (0: no limit)."""
        pool = await self._pool(lane)
        limit = self._timeout + GRACE_SECONDS
        try:
            correct = await pool.call("grade", *question, cpu, self._timeout, timeout=limit, tries=2)
        except CallTimeout:
            return Verdict(False, "timeout")
        except InvalidOutcome as failure:
            if failure.kind != "crash":
                raise
            return Verdict(False, "crash")
        return None if correct is None else Verdict(correct)

    async def _pool(self, lane: int) -> Processes:
        async with self._starting[lane]:
            if lane not in self._pools:
                settings = {"niceness": _LOW_PRIORITY if lane else 0}
                pool = Processes(HOST, settings, count=self._counts[lane], name=f"math_verify-{lane}")
                await pool.start()
                self._pools[lane] = pool
            return self._pools[lane]
