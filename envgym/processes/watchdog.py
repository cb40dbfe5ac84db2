"""Stacks of what takes unusually long, in the log of the process that it takes long in: for people who look at a run
that seems to hang. Nothing is ended by it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

CONTROLLER_LOG = "controller.log"
"""Among a run's logs, the file of the process that makes the calls."""


def seconds() -> float:
    """Seconds after which stacks are written, and again: `ENVGYM_STACKS_SECONDS`, by default 600."""
    return float(os.environ.get("ENVGYM_STACKS_SECONDS", "600"))


@contextlib.contextmanager
def watched_thread(function: Callable[..., Any]) -> Iterator[None]:
    """Within it, what holds the event loop is written to standard error: the stacks of all threads. Not for coroutine
    functions, which run later: a process has one such timer, and theirs may be set."""
    if inspect.iscoroutinefunction(function):
        yield
        return
    faulthandler.dump_traceback_later(seconds(), repeat=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def write_tasks(file: TextIO, what: str) -> None:
    """Write the stacks of all tasks of the event loop."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what} takes long; what is waited for:", file=file)
    for task in asyncio.all_tasks():
        print(f"  {task.get_name()}", file=file)
        awaited: Any = task.get_coro()
        while awaited is not None:  # from the task's own coroutine to the one that waits
            frame = getattr(awaited, "cr_frame", None)
            if frame is not None:
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                print(f"    {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}: {line}", file=file)
            awaited = getattr(awaited, "cr_await", None)
    file.flush()


class CallWatch:
    """Watches coroutines of a process; `log` is where the stacks of its tasks go, by default standard error."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._written = -1e9

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Within it, all tasks' stacks are written when it takes long; for calls at the same time, once."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds(), self._write, what)
        try:
            yield
        finally:
            timer.cancel()

    def _write(self, what: str) -> None:
        now = time.monotonic()
        if now - self._written < seconds():
            return
        self._written = now
        if self._log is None:
            write_tasks(sys.stderr, what)
        else:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                write_tasks(file, what)
