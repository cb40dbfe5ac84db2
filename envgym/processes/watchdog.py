"""Stack traces of slow calls, in the log of their process, for the diagnosis of a run that seems to hang. No call is
ended."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import itertools
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

CONTROLLER_LOG = "controller.log"
"""The controller's file among a run's logs."""


def stack_seconds() -> float:
    """Seconds between two dumps of stacks: `ENVGYM_STACKS_SECONDS`, by default 600."""
    return float(os.environ.get("ENVGYM_STACKS_SECONDS", "600"))


@contextlib.contextmanager
def watched_thread(function: Callable[..., Any]) -> Iterator[None]:
    """In its body, the stacks of all threads are written to standard error if the event loop is blocked. Not for
    coroutine functions, which run later: a process has only one such timer."""
    if inspect.iscoroutinefunction(function):
        yield
        return
    faulthandler.dump_traceback_later(stack_seconds(), repeat=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def write_tasks(file: TextIO, subject: str) -> None:
    """Write the stacks of all tasks of the event loop; `subject` names the slow call."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {subject} takes long; the tasks wait for:", file=file)
    for task in asyncio.all_tasks():
        print(f"  {task.get_name()}", file=file)
        awaited: Any = task.get_coro()
        while awaited is not None:  # from the task's own coroutine to the innermost one
            frame = getattr(awaited, "cr_frame", None)
            if frame is not None:
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                print(f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}: {line}", file=file)
            awaited = getattr(awaited, "cr_await", None)
    file.flush()


class CallWatch:
    """Watches coroutines of a process; `log` is the file for the stacks of its tasks, by default standard error."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._calls: dict[int, tuple[float, str]] = {}
        """The starts of the running calls and what they are, the oldest first."""
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watching(self, subject: str) -> Iterator[None]:
        """In its body, the stacks of all tasks are written if it takes long; once for concurrent calls."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(stack_seconds(), self._check)
        number = next(self._numbers)
        self._calls[number] = time.monotonic(), subject
        try:
            yield
        finally:
            del self._calls[number]
            if not self._calls and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _check(self) -> None:
        """Write if the oldest call takes long, and check again when the oldest may."""
        seconds, (start, subject) = stack_seconds(), next(iter(self._calls.values()))
        left = start + seconds - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else seconds, self._check)
        if left <= 0:
            self._write(subject)

    def _write(self, subject: str) -> None:
        if self._log is None:
            write_tasks(sys.stderr, subject)
        else:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                write_tasks(file, subject)
