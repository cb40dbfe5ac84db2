"""Calls that several wait for: whoever asks for what is being asked for already gets the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from envgym.processes.cancellation import is_being_cancelled

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """At most one call at a time for each key, in a task of its own: it goes on when those who wait for it give up."""

    def __init__(self) -> None:
        self._tasks: dict[Key, asyncio.Task[Result]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    async def result(
        self, key: Key, call: Callable[[], Coroutine[Any, Any, Result]], *, closed: Exception | None = None
    ) -> Result:
        """The result of the call on its way for `key`, else of a new one. Raises `closed`, if given, where `cancel`
        ended it."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda task: self._done(key, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if closed is None or not task.cancelled() or is_being_cancelled():
                raise
            raise closed from None

    def _done(self, key: Key, task: asyncio.Task[Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # those who asked may have gone

    def cancel(self) -> list[asyncio.Task[Result]]:
        """Cancel the calls, and return their tasks."""
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    async def close(self) -> None:
        """Cancel the calls, and wait until they have ended."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)
