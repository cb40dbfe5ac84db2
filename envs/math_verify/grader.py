"""Grades answers in processes that can be killed: an answer that hangs costs its deadline and nothing else."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from envgym.errors import CallTimeout, InvalidOutcome, WorkerDied
from envgym.net.shared_calls import SharedCalls
from envgym.processes.pool import Processes

from .answers import looks_costly

if TYPE_CHECKING:
    from .worker import Worker

WORKER_CLASS = "envgym.envs.math_verify.worker:Worker"
CACHE_SIZE = 4096
SLICE = 0.25
"""Seconds of CPU time that every answer gets immediately; most take a tenth of it. An answer that needs more is graded
again in the queue of costly ones, with four times as much, and then once more up to its deadline: no answer waits
longer than a slice for another."""
PATIENCE = 12
"""Deadlines that a costly answer may wait for its turn, and that a process may take on a busy machine for the CPU time
of one. It bounds how long hundreds of hostile answers delay a training step."""
GRACE_SECONDS = 10.0
"""Seconds past the end of patience after which a process that does not report it is killed."""

Question = tuple[str, str, str]
"""Answer, reference, problem."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of an answer. `failure` is `timeout` if grading ran out of time, and `crash` if the answer killed the
    process twice. `is_late` tells a timeout of the grader, which was too busy, from one of the answer: the answer then
    has no grade."""

    correct: bool
    failure: Literal["", "timeout", "crash"] = ""
    is_late: bool = False


LATE = Grade(False, "timeout", is_late=True)


class Grader:
    """Grades answers in the children of one process, which is started when first needed.

    At a time, `processes` answers are graded within one slice of CPU time, and at low priority one within a longer
    slice and one up to the deadline. So hundreds of hostile answers delay no other. `timeout`, the deadline, is in
    seconds of CPU time per answer: the time before its turn does not count. The process is called from a dedicated loop
    and thread, so that a grader outlives the loop that first used it.
    """

    def __init__(self, processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._turns = [asyncio.Semaphore(count) for count in (processes, 1, 1)]
        self._pool: Processes[Worker] = Processes(WORKER_CLASS, {}, count=1, calls=processes + 2, name="math_verify")
        self._grading: SharedCalls[Question, Grade] = SharedCalls()
        self._grades: dict[Question, Grade] = {}
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grader", daemon=True)
        self._thread.start()

    async def grade(self, answer: str, gold: str, problem: str = "") -> Grade:
        """Grade an answer to `problem` against `gold`. Equal questions share one grading; the latest are cached.

        Raises `WorkerError` where grading processes do not start, or the grader is closed.
        """
        future: Future[Grade] = asyncio.run_coroutine_threadsafe(self._grade_once((answer, gold, problem)), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and future.cancelled():
                raise WorkerDied("the grader was closed") from None
            raise

    async def close(self) -> None:
        """Kill the processes; gradings still under way raise `WorkerDied`."""
        self._closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- on the dedicated loop -----------------------------------------------------------------------------

    async def _end(self) -> None:
        await self._grading.close()
        await self._pool.close()

    async def _grade_once(self, key: Question) -> Grade:
        """The grade of a question: a cached one, that of an equal question in progress, or a new one."""
        if key in self._grades:
            self._grades[key] = grade = self._grades.pop(key)  # moves to the end: the cache drops the oldest use
            return grade
        return await self._grading.result(key, lambda: self._grade_and_cache(key))

    async def _grade_and_cache(self, key: Question) -> Grade:
        await self._pool.start()
        grade = await self._grade_in_turn(*key)
        if not grade.failure:
            self._grades[key] = grade
            if len(self._grades) > CACHE_SIZE:
                del self._grades[next(iter(self._grades))]
        return grade

    async def _grade_in_turn(self, answer: str, gold: str, problem: str) -> Grade:
        """Grade an answer in one slice of CPU time, else in a longer one, else by the deadline."""
        give_up = math.inf
        for tries, cpu in enumerate((SLICE, 4 * SLICE, math.inf)):
            cpu = min(cpu, self._timeout)
            if tries == 0 and looks_costly(answer):
                continue
            if tries and math.isinf(give_up):
                give_up = time.monotonic() + PATIENCE * self._timeout
            async with self._turns[tries]:
                if time.monotonic() > give_up:
                    return LATE
                grade = await self._ask((answer, gold, problem), cpu, is_costly=tries > 0)
            if grade is not None or cpu == self._timeout:
                break
        return grade or Grade(False, "timeout")

    async def _ask(self, question: Question, cpu: float, *, is_costly: bool) -> Grade | None:
        """The grade, or None if grading takes more than `cpu` seconds of CPU time."""
        limit = PATIENCE * self._timeout
        try:
            correct = await self._pool.call(
                lambda worker: worker.grade(*question, cpu, limit, is_costly=is_costly),
                timeout=limit + GRACE_SECONDS,
                tries=2,
            )
        except CallTimeout:
            return LATE
        except InvalidOutcome as failure:
            if failure.kind != "crash":
                raise
            return Grade(False, "crash")
        return None if correct is None else Grade(correct)
