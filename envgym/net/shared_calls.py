"""Shared calls: concurrent requests for the same key get the result of one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from envgym.processes.cancellation import is_being_cancelled

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SharedCalls(Generic[Key, Result]):
    """At most one call at a time per key, in a separate task: it continues if its waiters are cancelled."""

    def __init__(self) -> None:
        self._tasks: dict[Key, asyncio.Task[Result]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tasks

    async def result(
        self, key: Key, call: Callable[[], Coroutine[Any, Any, Result]], *, closed: Exception | None = None
    ) -> Result:
        """The result of the call in flight for `key`, else of a new one. Raises `closed`, if set, when `cancel` ended
        the call."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda task: self._remove(key, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if closed is None or not task.cancelled() or is_being_cancelled():
                raise
            raise closed from None

    def _remove(self, key: Key, task: asyncio.Task[Result]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # there may be no waiter

    def cancel(self) -> list[asyncio.Task[Result]]:
        """Cancel the calls, and return their tasks."""
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    async def close(self) -> None:
        """Cancel the calls, and wait for their end."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)
