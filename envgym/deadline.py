"""A deadline that stands still while a service's rate limit is waited for, which is nobody's own time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType


class Deadline:
    """`async with Deadline(seconds)`: like `asyncio.timeout`, but `standing_still` stops the clock, inside of it and in
    tasks that were made there. Enter it once."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(None)
        self._left = seconds
        self._waits = 0
        self._is_open = False

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        self._loop, self._is_open = asyncio.get_running_loop(), True
        self._run()
        self._token = _AROUND.set((*_AROUND.get(), self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _AROUND.reset(self._token)
        self._is_open = False
        await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        return self._timeout.expired()

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        self._waits += 1
        if self._waits == 1 and self._counts():
            self._left = (self._timeout.when() or 0.0) - self._loop.time()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._waits -= 1
            if self._waits == 0 and self._counts():
                self._run()

    def _counts(self) -> bool:
        """Whether it can still expire: a request that several wait for may outlive the episode that made it."""
        return self._is_open and not self.expired() and asyncio.get_running_loop() is self._loop

    def _run(self) -> None:
        self._timeout.reschedule(self._loop.time() + self._left)


_AROUND: ContextVar[tuple[Deadline, ...]] = ContextVar("AROUND", default=())
"""The deadlines that what is running is under."""


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """No deadline around this moves on meanwhile."""
    with contextlib.ExitStack() as stack:
        for deadline in _AROUND.get():
            stack.enter_context(deadline._stopped())
        yield
