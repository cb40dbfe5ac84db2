"""Collects the requests of concurrent callers into batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from envgym.errors import WorkerError
from envgym.processes.cancellation import cancel_all, start_task

Item = TypeVar("Item")
Result = TypeVar("Result")

WINDOW = 0.005
"""Seconds without a new item after which a batch is closed."""
WINDOWS = 20
"""Maximum number of windows for which a batch waits for more items."""


class Batcher(Generic[Item, Result]):
    """Calls `send` with the items of many callers and hands each its result.

    While a batch is being sent the next one fills, so that it grows with the load. At most `size` items are in a
    batch, the longest waiting first, ordered by their `repr`; at most `in_flight` batches are sent concurrently. `send`
    returns a result or an exception for each item, in order; one that raises fails all of them.
    """

    def __init__(
        self, send: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]], *, size: int, in_flight: int = 1
    ) -> None:
        self._send = send
        self._size = size
        self._slots = asyncio.Semaphore(in_flight)
        self._waiting: list[tuple[str, Item, asyncio.Future[Result]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """The result of `item`, sent in a batch with others."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((repr(item), item, future))  # one that is nested too deeply for `repr` fails here, alone
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.create_task(self._pump())
        return await future

    async def close(self) -> None:
        """Stop sending; waiting callers get a `WorkerError`."""
        await cancel_all([*self._tasks, *([self._pumping] if self._pumping is not None else [])])
        _fail(self._waiting)
        self._waiting = []

    async def _pump(self) -> None:
        """Send the waiting items in batches, as slots become free, until there are none."""
        while self._waiting:
            await self._slots.acquire()
            await self._fill()
            self._waiting = [entry for entry in self._waiting if not entry[2].done()]  # a caller's deadline has passed
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            start_task(self._deliver(sorted(batch, key=lambda entry: entry[0])), self._tasks)

    async def _fill(self) -> None:
        for _ in range(WINDOWS):
            count = len(self._waiting)
            await asyncio.sleep(WINDOW)
            if len(self._waiting) == count or len(self._waiting) >= self._size:
                return

    async def _deliver(self, batch: list[tuple[str, Item, asyncio.Future[Result]]]) -> None:
        """Send a batch, and give each caller its result or error."""
        try:
            results: Sequence[Result | Exception] = await self._send([item for _, item, _ in batch]) if batch else []
        except asyncio.CancelledError:
            _fail(batch)
            raise
        except Exception as error:  # passed on to the callers
            results = [error] * len(batch)
        finally:
            self._slots.release()
        for (_, _, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def _fail(batch: Sequence[tuple[Any, Any, asyncio.Future[Any]]]) -> None:
    for *_, future in batch:
        if not future.done():
            future.set_exception(WorkerError("the service was closed while it was being asked"))
            future.exception()  # marks it as retrieved: the caller may be gone
