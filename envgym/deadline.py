"""A deadline that stands still while a service's rate limit is waited for, which is nobody's own time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType
from weakref import WeakKeyDictionary


class Deadline:
    """`async with Deadline(seconds)`: like `asyncio.timeout`, but `standing_still` stops the clock, inside of it and in
    tasks that were made there. Enter it once."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(None)
        self._left = seconds
        self._waits = 0
        self._is_open = False

    async def __aenter__(self) -> Deadline:
        self._loop = asyncio.get_running_loop()
        self._alarm = _alarm(self._loop)
        await self._timeout.__aenter__()
        self._alarm.set(self._timeout, self._loop.time() + self._left)
        self._is_open = True
        self._token = _AROUND.set((*_AROUND.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _AROUND.reset(self._token)
        self._is_open = False
        self._alarm.unset(self._timeout, 0.0)
        await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        return self._timeout.expired()

    def expire(self) -> None:
        """Be over now."""
        if self._counts():
            self._alarm.set(self._timeout, self._loop.time())

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        self._waits += 1
        if self._waits == 1 and self._counts():
            now = self._loop.time()
            self._left = self._alarm.unset(self._timeout, now) - now
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and self._counts():
                self._alarm.set(self._timeout, self._loop.time() + self._left)

    def _counts(self) -> bool:
        """Whether it can still expire: a request that several wait for may outlive the episode that made it."""
        return self._is_open and not self.expired() and asyncio.get_running_loop() is self._loop


class _Alarm:
    """When the deadlines of one event loop are due, behind one timer: a timer for each costs as much as many a call
    that is under one. It refers to no loop but by deadlines that run, so that a loop can be forgotten."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Timeout, float] = {}
        self._rings_at: float | None = None

    def set(self, timeout: asyncio.Timeout, when: float) -> None:
        self._due[timeout] = when
        if self._rings_at is None or when < self._rings_at:
            self._ring_at(when)

    def unset(self, timeout: asyncio.Timeout, now: float) -> float:
        """When it would have been due; now, where it was."""
        return self._due.pop(timeout, now)

    def _ring_at(self, when: float) -> None:
        self._rings_at = when
        asyncio.get_running_loop().call_at(when, self._ring, when)

    def _ring(self, now: float) -> None:
        if now != self._rings_at:
            return  # it was set for an earlier time since
        self._rings_at = None
        for timeout in [timeout for timeout, when in self._due.items() if when <= now]:
            del self._due[timeout]
            timeout.reschedule(now)
        if self._due:
            self._ring_at(min(self._due.values()))


_AROUND: ContextVar[tuple[Deadline, ...]] = ContextVar("AROUND", default=())
"""The deadlines that what is running is under."""
_ALARMS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Alarm] = WeakKeyDictionary()


def _alarm(loop: asyncio.AbstractEventLoop) -> _Alarm:
    found = _ALARMS.get(loop)
    if found is None:
        found = _ALARMS[loop] = _Alarm()
    return found


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """No deadline around this moves on meanwhile."""
    with contextlib.ExitStack() as stack:
        for deadline in _AROUND.get():
            stack.enter_context(deadline._stopped())
        yield
