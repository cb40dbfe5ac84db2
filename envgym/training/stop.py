"""The user's request that a run stops: the signals that make it, and waiting that ends with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from envgym.processes.watch import end_immediately

if TYPE_CHECKING:
    from envgym.monitoring.display import Display

T = TypeVar("T")


class Stopped(Exception):
    """The user asked the run to stop (Ctrl-C)."""


class Stop(asyncio.Event):
    """Set when the user has asked the run to stop."""

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises `Stopped`, and cancels it, where the stop is asked for first."""
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
    """Ctrl-C, SIGTERM and a terminal that is closed (SIGHUP): before the loop runs they end everything at once; then
    the first asks it to stop and the second ends everything at once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._ask: Callable[[], None] | None = None
        self._is_handled = True
        self._asked = False
        self._is_over = False
        self._signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else it was started with nohup
            self._signals.append(signal.SIGHUP)

    def listen(self, ask: Callable[[], None]) -> None:
        """From now on the first signal calls `ask`."""
        self._ask = ask

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def interrupted() -> None:
            if self._is_over:
                return
            self._is_handled = True
            ask, self._ask = self._ask, None
            if ask is None:
                task.cancel()
            else:
                ask()
                self._display.note("stopping after this step's work; once more to stop at once")

        def signalled(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGHUP and self._asked:
                return  # a shell and the kernel tell of the same closed terminal
            if self._asked:
                end_immediately()
            loop.call_soon_threadsafe(interrupted)
            self._asked = True
            if not self._is_handled:  # the first was not: something holds the loop
                self._is_over = True
                task.cancel()  # or an episode would take what is raised for a failure of its own
                raise KeyboardInterrupt
            self._is_handled = False

        loop = asyncio.get_running_loop()
        self._before = {number: signal.signal(number, signalled) for number in self._signals}

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
