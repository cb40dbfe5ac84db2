"""A timeout that pauses while the code waits for a service's rate limit or a free slot of a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TypeVar

from envgym.errors import CallTimeout

from . import cancellation

T = TypeVar("T")


class Deadline:
    """`async with Deadline(seconds)`: like `asyncio.timeout`, but `pause_timeouts` stops the clock, in the block and in
    tasks created there, and `run_to_end` is notified of work that ignores it. Enter it once."""

    def __init__(self, seconds: float, name: str = "") -> None:
        self.seconds = seconds
        self.name = name
        """The subject of messages about it."""
        self._is_overrun = False
        self._timeout = asyncio.timeout(None)
        self._seconds_left = seconds
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        self._token: Token[tuple[Deadline, ...]] | None = None

    async def __aenter__(self) -> Deadline:
        self._loop = asyncio.get_running_loop()
        self._overrun = cancellation.OVERRUN.get()
        await self._timeout.__aenter__()
        self._token = _ENCLOSING.set((*_ENCLOSING.get(), self))
        self._set_timer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _ENCLOSING.reset(self._token)
        self._token = None
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        return self._timeout.expired() or self._is_overrun

    def expire_if_overrun(self) -> bool:
        """Count as expired if its time is over but its timer cannot fire, because the running code blocks the loop.
        Returns whether it does. Callable from any thread."""
        if self._pauses == 0 and self._timer is not None and self._timer.when() < self._loop.time():
            self._is_overrun = True
        return self._is_overrun

    def expire(self) -> None:
        """Expire now."""
        if self._can_expire():
            if self._timer is not None:
                self._timer.cancel()
            self._fire()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._seconds_left, self._fire)

    def _fire(self) -> None:
        self._timeout.reschedule(self._loop.time())
        if self._overrun is not None:
            self._timer = self._loop.call_later(cancellation.GRACE_SECONDS, cancellation.settle, self._overrun)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._pauses += 1
        if self._pauses == 1 and self._can_expire() and self._timer is not None:
            self._seconds_left = self._timer.when() - self._loop.time()
            self._timer.cancel()
            if self._seconds_left <= 0:  # the timer was about to fire
                self._fire()
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0 and self._can_expire():
                self._set_timer()

    def _can_expire(self) -> bool:
        """True while it is entered and not over: a shared request may outlive the episode that made it."""
        return self._token is not None and self._timeout.when() is None and asyncio.get_running_loop() is self._loop


async def call_in_time(call: Awaitable[T], seconds: float, name: str) -> T:
    """The result of a call. Raises `CallTimeout` if it takes longer, even if it returned a result when cancelled."""
    deadline = Deadline(seconds, name)
    try:
        async with deadline:
            result = await call
        if not deadline.expired():
            return result
    except TimeoutError:
        if not deadline.expired():
            raise  # the call's own
    raise CallTimeout(f"{name} took longer than {seconds:g} s")


_ENCLOSING: ContextVar[tuple[Deadline, ...]] = ContextVar("ENCLOSING", default=())
"""The deadlines around the running code."""


@contextlib.contextmanager
def pause_timeouts() -> Iterator[None]:
    """Stop the clocks of all enclosing deadlines, for example while rate-limited."""
    with contextlib.ExitStack() as stack:
        for deadline in _ENCLOSING.get():
            stack.enter_context(deadline._paused())
        yield
