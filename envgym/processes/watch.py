"""A watchdog of the event loop: it reports code that blocks the loop past its deadline, when no timer can fire, and
ends the process after a second Ctrl-C though code blocks the loop permanently."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback

from envgym.loading import is_user_file

from . import cancellation
from .cancellation import Deadline
from .signals import interrupt

BEAT_SECONDS = 0.5
"""Seconds between two heartbeats of the loop, and between two checks of them."""

_urgent = threading.Event()


def end_immediately() -> None:
    """Interrupt the code that blocks the loop, as Ctrl-C does; end the process if that does not help."""
    _urgent.set()


class LoopWatch:
    """`with LoopWatch(loop):` around everything that runs in `loop`, in this thread. A timer of the loop beats, and a
    thread checks the beats. Neither slows a call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._reported: set[str] = set()

    def __enter__(self) -> None:
        _urgent.clear()
        self._beat()
        threading.Thread(target=self._check_beats, daemon=True, name="loop watch").start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _check_beats(self) -> None:
        since = None
        while not self._stop.wait(BEAT_SECONDS):
            moment = time.monotonic()
            if moment - self._last < 3 * BEAT_SECONDS:
                since = None
            elif not _urgent.is_set():
                self._report()
            elif since is None:
                since = moment
            elif moment - since > cancellation.GRACE_SECONDS:
                self._end()
            else:
                interrupt(self._thread)

    def _report(self) -> None:
        """Report the call that blocks the loop past its deadline, and mark it as timed out."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[self._thread])]  # innermost first
        if any(os.path.basename(frame.f_code.co_filename) == "bdb.py" for frame in frames):
            return  # a debugger is waiting for input
        deadline, inner = None, []
        for frame in frames:  # up to the innermost deadline
            deadline = next((value for value in frame.f_locals.values() if isinstance(value, Deadline)), None)
            if deadline is not None:
                break
            inner.append(frame)
        if deadline is None or not deadline.expire_if_overrun():
            return
        frame = next((frame for frame in inner if is_user_file(frame.f_code.co_filename)), frames[0])
        location = f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
        if location not in self._reported:
            self._reported.add(location)
            _print(
                f"{deadline.name or 'a call'} has blocked everything else for more than {deadline.seconds:g} s, in "
                f"{location}: let it await what it waits for, or write the method as plain def, which gets a thread of "
                "its own; Ctrl-C twice ends the run"
            )

    def _end(self) -> None:
        if self._thread == threading.main_thread().ident:
            _print("ended immediately: a call blocks the event loop and does not end")
            os._exit(128 + signal.SIGINT)  # the child processes end with this one
        _print("a call blocks the run's event loop and does not end: restart the kernel")
        self._stop.set()


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f"envgym: {line}", file=sys.stderr, flush=True)
