"""Grades answers in processes that can be killed: an answer that hangs costs its deadline and nothing else.

Every process is served by one thread, which waits for it at most until the deadline. Threads, not asyncio's
subprocesses: they belong to no event loop, so a grader outlives the loop that first used it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envgym.errors import WorkerDied, WorkerError

from .answers import looks_costly

START_SECONDS = 60.0
CACHE_SIZE = 4096
SLICE = 0.25
"""Seconds of CPU time that every answer gets at once; most take a tenth of it. What needs more starts again among the
costly, with four times as much, and then once more without a limit but the deadline: nobody waits longer than a
slice for the answer of another."""
PATIENCE = 3
"""Deadlines that a costly answer may wait for its turn: hundreds of hostile ones hold a step up for so long, not
for a deadline each."""
_LOW_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the answer is right; `failure` says that grading it ran out of time, or never had its
    turn behind others that did, or killed the process twice."""

    correct: bool
    failure: Literal["", "timeout", "crash"] = ""


class Grader:
    """A pool of grading processes, started when first needed.

    Answers that have used up their slice, and those that look as if they would, wait for a process of their own, of low
    priority, and those that have used up a longer one for another, so that hundreds of hostile ones delay none of the
    others. `timeout` is in seconds, for one answer.
    """

    def __init__(self, processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._lanes = [ThreadPoolExecutor(n, thread_name_prefix="grader") for n in (processes, 1, 1)]
        self._own = threading.local()  # each thread's process
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._closed = False
        self._verdicts: OrderedDict[tuple[str, str], Future[Verdict]] = OrderedDict()

    async def grade(self, answer: str, gold: str) -> Verdict:
        """Grade `answer` against `gold`. Equal questions share one grading, and the last few thousand are kept.

        Raises `WorkerError` where grading processes do not start.
        """
        key = (answer, gold)
        if key not in self._verdicts:
            self._verdicts[key] = self._submit(answer, gold)
            if len(self._verdicts) > CACHE_SIZE:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        waiting = asyncio.wrap_future(self._verdicts[key])
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # known, if nobody waits any more
        try:
            # Shielded: one who no longer waits must not take the verdict from the others.
            verdict = await asyncio.shield(waiting)
        except WorkerError:
            self._verdicts.pop(key, None)
            raise
        if verdict.failure:
            self._verdicts.pop(key, None)
        return verdict

    def close(self) -> None:
        """Kill the processes and end the threads; gradings still under way raise `WorkerDied`."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for executor in self._lanes:
            executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for executor in self._lanes:
            executor.shutdown(wait=True)
        for worker in workers:
            worker.close()

    def _submit(self, answer: str, gold: str) -> Future[Verdict]:
        """Have an answer graded: in its slice, or in a longer one, or by the deadline."""
        verdict: Future[Verdict] = Future()
        verdict.set_running_or_notify_cancel()  # one who no longer waits cannot cancel it
        give_up = math.inf

        def enter(lane: int) -> None:
            nonlocal give_up
            if lane and math.isinf(give_up):
                give_up = time.monotonic() + PATIENCE * self._timeout
            cpu = (SLICE, 4 * SLICE, math.inf)[lane]
            try:
                graded = self._lanes[lane].submit(self._grade, answer, gold, _LOW_PRIORITY * bool(lane), cpu, give_up)
            except RuntimeError:
                verdict.set_exception(WorkerDied("the grader was closed"))
            else:
                graded.add_done_callback(lambda done: leave(done, lane))

        def leave(graded: Future[Verdict | None], lane: int) -> None:
            if graded.cancelled():
                verdict.set_exception(WorkerDied("the grader was closed"))
            elif error := graded.exception():
                verdict.set_exception(error)
            elif (found := graded.result()) is not None:
                verdict.set_result(found)
            else:
                enter(lane + 1)

        enter(1 if looks_costly(answer) else 0)
        return verdict

    def _grade(self, answer: str, gold: str, niceness: int, cpu: float, give_up: float) -> Verdict | None:
        """Runs in a thread of the pool; None where the answer needs more than `cpu` seconds of CPU time.

        A process that dies is replaced, and its answer tried once more.
        """
        if time.monotonic() > give_up:
            return Verdict(False, "timeout")
        for _ in range(2):
            worker = getattr(self._own, "worker", None) or self._start(niceness)
            try:
                return Verdict(worker.grade(answer, gold, cpu, self._timeout))
            except SliceOver:
                return None
            except TimeoutError:
                return Verdict(False, "timeout")
            except ChildDied:
                continue
            except (EOFError, OSError):
                self._replace(worker, niceness)
            except WorkerError:
                self._stop(worker)
                raise
        return Verdict(False, "crash")

    def _start(self, niceness: int) -> Worker:
        with self._lock:
            if self._closed:
                raise WorkerDied("the grader was closed")
            self._own.worker = worker = Worker(niceness)
            self._workers.add(worker)
        return worker

    def _stop(self, worker: Worker) -> None:
        self._own.worker = None
        worker.close()
        with self._lock:
            self._workers.discard(worker)

    def _replace(self, worker: Worker, niceness: int) -> None:
        """Start the next process at once: it gets ready while nothing waits for it."""
        self._stop(worker)
        self._start(niceness)


class SliceOver(Exception):
    """An answer took all the CPU time it was given."""


class ChildDied(Exception):
    """What graded was killed, by itself or from outside."""


class Worker:
    """One grading process and its child, which grades. It belongs to one thread; only `kill` may be called from
    another."""

    def __init__(self, niceness: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(os.getpid()), str(niceness)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            process_group=0,
        )  # fmt: skip
        self._child = 0
        self._asked = 0
        self._read = b""

    def grade(self, answer: str, gold: str, cpu: float, timeout: float) -> bool:
        """Whether an answer is right.

        Raises `TimeoutError` past `timeout` seconds, `SliceOver` past `cpu` seconds of CPU time (infinite: no limit),
        `ChildDied`, `EOFError` or `OSError` where a process died, `WorkerError` where it could not start.
        """
        if not self._child:
            self._wait_until_ready()
        assert self._process.stdin is not None
        self._asked += 1
        limit = 0.0 if math.isinf(cpu) else cpu  # 0 sets no timer
        request = {"id": self._asked, "answer": answer, "gold": gold, "cpu": limit}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + timeout
        try:
            reply = self._receive(deadline)
            while "correct" in reply and reply["id"] != self._asked:  # to a question given up
                reply = self._receive(deadline)
        except TimeoutError:
            os.kill(self._child, signal.SIGKILL)
            self._child = 0  # its successor says when it is ready
            raise
        if "correct" in reply:
            return bool(reply["correct"])
        self._child = reply["ready"]
        raise SliceOver if reply["ended"] == signal.SIGPROF else ChildDied

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes. Safe to call twice."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            hello = self._receive(deadline)
            while "correct" in hello:  # the last word of the one before
                hello = self._receive(deadline)
        except TimeoutError:
            raise WorkerError(f"a grading process was not ready after {START_SECONDS:.0f} s") from None
        if "error" in hello:
            raise WorkerError(f"grading processes do not start: {hello['error']}")
        self._child = hello["ready"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = self._process.stdout.read(4096)
                if not chunk:
                    raise EOFError
                self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply
