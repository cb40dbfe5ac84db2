"""The user's request to stop a run: the signals that make it, and the cancelling of work in progress."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.processes.signals import set_handlers
from envgym.processes.watch import end_immediately

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

T = TypeVar("T")


class Stopped(Exception):
    """The user asked the run to stop (Ctrl-C)."""


class Stop(asyncio.Event):
    """Set when the user has asked the run to stop."""

    async def run_until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the stop is requested first, cancels it and raises `Stopped`."""
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([job, stop], return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Stopped
            return job.result()
        finally:
            job.cancel()
            stop.cancel()
            await asyncio.gather(job, stop, return_exceptions=True)


class Interrupts:
    """Handlers of Ctrl-C, SIGTERM and a closed terminal (SIGHUP). Before the loop runs, the first signal ends
    everything immediately; then the first requests a stop, and the second ends everything immediately."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._request_stop: Callable[[], None] | None = None
        self._is_handled = True
        self._has_signal = False
        self._is_over = False
        self._signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            self._signals.append(signal.SIGHUP)

    def listen(self, request_stop: Callable[[], None]) -> None:
        """Let the next signal call `request_stop` instead of ending everything."""
        self._request_stop = request_stop

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self._is_over:
                return
            self._is_handled = True
            request_stop, self._request_stop = self._request_stop, None
            if request_stop is None:
                task.cancel()
            else:
                request_stop()
                self._display.note("stopping after this step's work; once more to stop immediately")

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._has_signal:
                return  # the shell and the kernel both signal a closed terminal
            if self._has_signal:
                end_immediately()
            loop.call_soon_threadsafe(interrupt)
            self._has_signal = True
            if not self._is_handled:  # the previous signal was not handled: something blocks the loop
                self._is_over = True
                task.cancel()  # else a running episode would take the exception for its own failure
                raise KeyboardInterrupt
            self._is_handled = False

        loop = asyncio.get_running_loop()
        self._previous_handlers = set_handlers(dict.fromkeys(self._signals, on_signal))

    def __exit__(self, *exc: object) -> None:
        set_handlers(self._previous_handlers)
