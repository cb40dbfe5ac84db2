"""Grades answers in processes that can be killed: an answer that hangs costs its deadline and nothing else.

Every process is served by one thread, which waits for it at most until the deadline. Threads, not asyncio's
subprocesses: they belong to no event loop, so a grader outlives the loop that first used it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import selectors
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
PATIENCE = 3
"""Deadlines that a costly answer may wait for its turn: hundreds of hostile ones hold a step up for so long, not
for a deadline each."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the answer is right; `failure` says that grading it ran out of time, or never had its
    turn behind others that did, or killed the process twice."""

    correct: bool
    failure: Literal["", "timeout", "crash"] = ""


class Grader:
    """A pool of grading processes, started when first needed.

    Answers that look costly wait for a process of their own, of low priority, so that hundreds of hostile
    ones delay none of the others. `timeout` is in seconds, for one answer.
    """

    def __init__(self, processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._quick = ThreadPoolExecutor(processes, thread_name_prefix="grader")
        self._costly = ThreadPoolExecutor(1, thread_name_prefix="grader-costly")
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
            costly = looks_costly(answer)
            executor = self._costly if costly else self._quick
            give_up = time.monotonic() + PATIENCE * self._timeout if costly else math.inf
            self._verdicts[key] = executor.submit(self._grade, answer, gold, 10 if costly else 0, give_up)
            if len(self._verdicts) > CACHE_SIZE:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        future = self._verdicts[key]
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # known, if nobody waits any more
        try:
            # Shielded: one who no longer waits must not take the verdict from the others.
            verdict = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise WorkerDied("the grader was closed") from None  # `close` cancelled the grading, nobody this task
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
        executors = (self._quick, self._costly)
        for executor in executors:
            executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for executor in executors:
            executor.shutdown(wait=True)
        for worker in workers:
            worker.close()

    def _grade(self, answer: str, gold: str, niceness: int, give_up: float) -> Verdict:
        """Runs in a thread of the pool. A process that dies is replaced, and its answer tried once more."""
        if time.monotonic() > give_up:
            return Verdict(False, "timeout")
        for _ in range(2):
            worker = getattr(self._own, "worker", None) or self._start(niceness)
            try:
                return Verdict(worker.ask({"answer": answer, "gold": gold}, self._timeout)["correct"])
            except TimeoutError:
                self._replace(worker, niceness)
                return Verdict(False, "timeout")
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


class Worker:
    """One grading process. It belongs to one thread; only `kill` may be called from another."""

    def __init__(self, niceness: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(os.getpid()), str(niceness)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._ready = False

    def ask(self, request: dict[str, str], timeout: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises `TimeoutError` past `timeout` seconds, `EOFError` or `OSError` where the process died,
        `WorkerError` where it could not start.
        """
        if not self._ready:
            self._wait_until_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._receive(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes. Safe to call twice."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _wait_until_ready(self) -> None:
        try:
            hello = self._receive(START_SECONDS)
        except TimeoutError:
            raise WorkerError(f"a grading process was not ready after {START_SECONDS:.0f} s") from None
        if "error" in hello:
            raise WorkerError(f"grading processes do not start: {hello['error']}")
        self._ready = True

    def _receive(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = self._process.stdout.read(4096)
                if not chunk:
                    raise EOFError
                line += chunk
        reply: dict[str, Any] = json.loads(line)
        return reply
