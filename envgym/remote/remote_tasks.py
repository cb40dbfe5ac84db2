"""The tasks of a remote environment, read by pages where that pays."""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from envgym.env import TaskSet
from envgym.types import Task

from .frames import Method
from .transport import RemoteError
from .wire import TaskPage

PAGE = 100
"""Tasks in a page."""
PAGES = 100
"""Pages kept in memory. The longest unused goes first."""
NEAR = 64
"""Tasks wanted last, by which is told whether a split too large to keep is gone through in order."""


class RemoteTasks(TaskSet):
    """A split on a server, read by pages when they are asked for; those read last are kept. Of a split that is larger
    than what is kept, and gone through in no order, tasks are read one by one.

    `ask(TaskPage, "GET", path)` answers requests below the environment's own path.
    """

    def __init__(self, ask: Callable[[type[TaskPage], Method, str], Awaitable[TaskPage]], split: str, size: int | None):
        self._ask = ask
        self._split = split
        self._size = size
        self._pages: OrderedDict[int, tuple[Task, ...]] = OrderedDict()
        self._wanted: deque[int] = deque(maxlen=NEAR)
        self._reading: dict[tuple[int, int], asyncio.Task[tuple[Task, ...]]] = {}
        """By their first task and their number."""

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        in_order = index - 1 in self._wanted or index + 1 in self._wanted
        self._wanted.append(index)
        number, offset = divmod(index, PAGE)
        if number in self._pages:
            self._pages.move_to_end(number)
            return self._pages[number][offset]
        all_are_kept = self._size is not None and self._size <= PAGE * PAGES
        if all_are_kept or in_order:
            return (await self._read(number * PAGE, PAGE))[offset]
        return (await self._read(index, 1))[0]

    async def _read(self, start: int, count: int) -> tuple[Task, ...]:
        reading = self._reading.get((start, count))
        if reading is None:  # whoever else wants it meanwhile waits for this one request
            reading = self._reading[start, count] = asyncio.create_task(self._ask_for(start, count))
            reading.add_done_callback(functools.partial(self._done, (start, count)))
        return await asyncio.shield(reading)

    def _done(self, key: tuple[int, int], reading: asyncio.Task[tuple[Task, ...]]) -> None:
        del self._reading[key]
        if not reading.cancelled():
            reading.exception()  # whoever wanted it may have gone

    async def _ask_for(self, start: int, count: int) -> tuple[Task, ...]:
        page = await self._ask(TaskPage, "GET", f"/tasks?split={self._split}&start={start}&count={count}")
        wanted = count if self._size is None else min(count, self._size - start)
        if len(page.tasks) < wanted:
            what = f"the server sent {len(page.tasks)} of {wanted} tasks from {start} on"
            raise RemoteError("server", what, retryable=True)
        if count == PAGE:
            self._pages[start // PAGE] = page.tasks
            if len(self._pages) > PAGES:
                self._pages.popitem(last=False)
        return page.tasks
