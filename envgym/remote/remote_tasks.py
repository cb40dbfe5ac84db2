"""The tasks of a remote environment, read by pages."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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


class RemoteTasks(TaskSet):
    """A split on a server, read by pages when they are asked for; those read last are kept.

    `ask(TaskPage, "GET", path)` answers requests below the environment's own path.
    """

    def __init__(self, ask: Callable[[type[TaskPage], Method, str], Awaitable[TaskPage]], split: str, size: int | None):
        self._ask = ask
        self._split = split
        self._size = size
        self._pages: OrderedDict[int, tuple[Task, ...]] = OrderedDict()
        self._reading: dict[int, asyncio.Task[tuple[Task, ...]]] = {}

    @property
    def size(self) -> int | None:
        return self._size

    async def get(self, index: int) -> Task:
        if index < 0 or (self._size is not None and index >= self._size):
            raise IndexError(f"task {index} of {self._size} in split {self._split!r}")
        number, offset = divmod(index, PAGE)
        if number in self._pages:
            self._pages.move_to_end(number)
            return self._pages[number][offset]
        if number not in self._reading:  # whoever else wants the page meanwhile waits for this one request
            self._reading[number] = asyncio.create_task(self._read(number))
            self._reading[number].add_done_callback(lambda _: self._reading.pop(number))
        return (await asyncio.shield(self._reading[number]))[offset]

    async def _read(self, number: int) -> tuple[Task, ...]:
        path = f"/tasks?split={self._split}&start={number * PAGE}&count={PAGE}"
        page = await self._ask(TaskPage, "GET", path)
        wanted = PAGE if self._size is None else min(PAGE, self._size - number * PAGE)
        if len(page.tasks) < wanted:
            what = f"the server sent {len(page.tasks)} of {wanted} tasks from {number * PAGE} on"
            raise RemoteError("server", what, retryable=True)
        self._pages[number] = page.tasks
        if len(self._pages) > PAGES:
            self._pages.popitem(last=False)
        return page.tasks
