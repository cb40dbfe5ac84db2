"""A watch on the event loop: code that holds it past its deadline is named, as no timer can fire meanwhile; and where
the user has asked twice for the end, the process ends though something holds the loop for good."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback

from envgym.loading import is_users

from . import cancellation
from .deadline import Deadline

BEAT_SECONDS = 0.5
"""Seconds between two beats of the loop, and between two looks at them."""

_urgent = threading.Event()


def end_at_once() -> None:
    """Have what holds the loop interrupted, as by Ctrl-C, and where it does not end by that, the process."""
    _urgent.set()


class LoopWatch:
    """`with LoopWatch(loop):` around all that runs in `loop`, in this thread. The loop beats while it is free; a thread
    looks after it. Neither costs a call anything."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._named: set[str] = set()

    def __enter__(self) -> None:
        _urgent.clear()
        self._beat()
        threading.Thread(target=self._look, daemon=True, name="loop watch").start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _look(self) -> None:
        since = None
        while not self._over.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - self._last < 3 * BEAT_SECONDS:
                since = None
            elif not _urgent.is_set():
                self._name()
            elif since is None:
                since = now
            elif now - since > cancellation.GRACE_SECONDS:
                self._end()
            else:
                signal.pthread_kill(self._thread, signal.SIGINT)

    def _name(self) -> None:
        """Say whose call holds the loop, once its deadline has passed, and let it count as timed out."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[self._thread])]  # innermost first
        if any(os.path.basename(frame.f_code.co_filename) == "bdb.py" for frame in frames):
            return  # a debugger waits for its user
        deadline, inner = None, []
        for frame in frames:  # up to the innermost deadline
            deadline = next((value for value in frame.f_locals.values() if isinstance(value, Deadline)), None)
            if deadline is not None:
                break
            inner.append(frame)
        if deadline is None or not deadline.overruns():
            return
        frame = next((frame for frame in inner if is_users(frame.f_code.co_filename)), frames[0])
        where = f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
        if where not in self._named:
            self._named.add(where)
            _print(
                f"{deadline.name or 'a call'} holds up everything else, for more than {deadline.seconds:g} s, in "
                f"{where}: let it await what it waits for, or write the method as plain def, which gets a thread of "
                "its own; Ctrl-C twice ends the run"
            )

    def _end(self) -> None:
        _print("ended at once: something holds the event loop and does not end")
        os._exit(128 + signal.SIGINT)  # our processes end with this one


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        print(f"envgym: {line}", file=sys.stderr, flush=True)
