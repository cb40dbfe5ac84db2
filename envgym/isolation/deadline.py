"""A deadline that stands still while a service's rate limit is waited for, which is nobody's own time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Generator, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from . import cancellation as heeding

T = TypeVar("T")


class Deadline:
    """`async with Deadline(seconds)`: like `asyncio.timeout`, but `standing_still` stops the clock, inside of it and in
    tasks that were made there. Enter it once."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(None)
        self._left = seconds
        self._waits = 0
        self._is_open = False
        self._has_rung = False

    async def __aenter__(self) -> Deadline:
        await self._start()
        self._token = _AROUND.set((*_AROUND.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _AROUND.reset(self._token)
        await self._end(kind, error, traceback)

    async def over(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to under this deadline, in place of `async with`: no clock is set for work that does not
        wait, as the steps of many environments do not."""
        began, token = time.monotonic(), _AROUND.set((*_AROUND.get(), self))
        try:
            try:
                waits_for = work.send(None)
            except StopIteration as done:
                result: T = done.value
                return result
            self._left -= time.monotonic() - began
            await self._start()
            try:
                result = await _Begun(work, waits_for)
            except BaseException as error:
                await self._end(type(error), error, error.__traceback__)
                raise
            await self._end(None, None, None)
            return result
        finally:
            _AROUND.reset(token)

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._alarm = _alarm(self._loop)
        self._ignored = heeding.ignored()
        await self._timeout.__aenter__()
        self._is_open = True
        if not self._waits:
            self._alarm.set(self, self._loop.time() + self._left)

    async def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._alarm.unset(self, 0.0)
        await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        return self._timeout.expired()

    def expire(self) -> None:
        """Be over now."""
        if self._counts():
            self._alarm.set(self, self._loop.time())

    def _ring(self, now: float) -> None:
        """The time is over; or, the second time, it was over a while ago and what runs here goes on."""
        if not self._has_rung:
            self._has_rung = True
            self._timeout.reschedule(now)
            self._alarm.set(self, now + heeding.GRACE_SECONDS)
        elif self._ignored is not None and not self._ignored.done():
            self._ignored.set_result(True)

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        self._waits += 1
        if self._waits == 1 and self._counts():
            now = self._loop.time()
            self._left = self._alarm.unset(self, now) - now
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and self._counts():
                self._alarm.set(self, self._loop.time() + self._left)

    def _counts(self) -> bool:
        """Whether it can still expire: a request that several wait for may outlive the episode that made it."""
        return self._is_open and not self._has_rung and asyncio.get_running_loop() is self._loop


class _Begun(Generic[T]):
    """A coroutine that was begun and waits, to be awaited."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._work, self._waits_for = work, waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    sent = yield waits_for
                except GeneratorExit:
                    self._work.close()
                    raise
                except BaseException as error:
                    waits_for = self._work.throw(error)
                else:
                    waits_for = self._work.send(sent)
            except StopIteration as done:
                result: T = done.value
                return result


class _Alarm:
    """When the deadlines of one event loop are due, behind one timer: a timer for each costs as much as many a call
    that is under one. It refers to no loop but by deadlines that run, so that a loop can be forgotten."""

    def __init__(self) -> None:
        self._due: dict[Deadline, float] = {}
        self._rings_at: float | None = None

    def set(self, deadline: Deadline, when: float) -> None:
        self._due[deadline] = when
        if self._rings_at is None or when < self._rings_at:
            self._ring_at(when)

    def unset(self, deadline: Deadline, now: float) -> float:
        """When it would have been due; now, where it was."""
        return self._due.pop(deadline, now)

    def _ring_at(self, when: float) -> None:
        self._rings_at = when
        asyncio.get_running_loop().call_at(when, self._ring, when)

    def _ring(self, when: float) -> None:
        if when != self._rings_at:
            return  # it was set for an earlier time since
        self._rings_at = None
        now = max(when, asyncio.get_running_loop().time())
        for deadline in [deadline for deadline, due in self._due.items() if due <= now]:
            del self._due[deadline]
            deadline._ring(now)
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
