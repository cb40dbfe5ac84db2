"""Rows from a user's Python function: `file.py:function`, called without arguments, yields them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from envgym.errors import DataError, EnvgymError
from envgym.loading import load_function
from envgym.types import Task

from .columns import TaskReader, reason_to_skip
from .rows import ListedRows, Row, RowLeftOut
from .task_set import TaskSet

MAX_ROWS = 10_000_000
"""A generator that yields more is probably meant to be endless."""
CACHED = 10_000
"""Last tasks of an endless generator that can be read again without restarting it."""


def read_generator(target: str, limit: int | None) -> ListedRows:
    """The first `limit` rows of a generator that ends. Raises `DataError`."""
    rows = list(itertools.islice(iterate_rows(target), limit or MAX_ROWS + 1))
    if len(rows) > MAX_ROWS:
        raise DataError(f"{target} has yielded {MAX_ROWS:,} rows without end: set data.limit, or data.endless=true")
    return ListedRows(rows, target, stem_of(target))


def iterate_rows(target: str) -> Iterator[Row]:
    """The rows that the function yields, from its start. Raises `DataError` if it fails or yields anything else."""
    function = load_function(target, "generator of rows")
    number = 0
    try:
        for row in function():
            number += 1
            if not isinstance(row, Mapping):
                raise DataError(f"{target}:{number}: a row is a mapping of fields, not a {type(row).__name__}")
            yield dict(row)
    except EnvgymError:
        raise
    except Exception as error:  # of the user's code
        raise DataError(f"{target} failed after {number} rows: {type(error).__name__}: {error}") from error


def stem_of(target: str) -> str:
    """The stem of the ids of a generator's rows: its function's name."""
    return Path(target).name.rpartition(":")[2]


class EndlessTasks(TaskSet):
    """The tasks of one split of an endless generator: `is_in_split` selects the keys of their prompts.

    A generator can only be read in order, so reading far ahead takes time, and reading far back restarts it: it must
    yield the same rows every time.
    """

    def __init__(self, target: str, reader: TaskReader, is_in_split: Callable[[int], bool]) -> None:
        self._target, self._reader, self._is_in_split = target, reader, is_in_split
        self._lock = threading.Lock()
        self._tasks: Iterator[Task] = iter(())
        self._last: deque[Task] = deque(maxlen=CACHED)
        self._count = 0

    @property
    def size(self) -> None:
        return None

    @property
    def index_bound(self) -> int:
        return CACHED

    async def get(self, index: int) -> Task:
        return await asyncio.to_thread(self._get, index)

    def _get(self, index: int) -> Task:
        if index < 0:
            raise IndexError(index)
        with self._lock:
            if self._count == 0 or index < self._count - len(self._last):
                self._tasks, self._count = self._read(), 0
                self._last.clear()
            try:
                while self._count <= index:
                    self._last.append(next(self._tasks))
                    self._count += 1
            except BaseException:  # the iterator is over: the next call starts it again, and raises this again
                self._count = 0
                raise
            return self._last[index - self._count]

    def _read(self) -> Iterator[Task]:
        number = 0
        for number, row in enumerate(iterate_rows(self._target), start=1):
            location = f"{self._target}:{number}"
            try:
                task, key = self._reader.read(row, location, f"{stem_of(self._target)}-{number}")
            except (RowLeftOut, DataError) as error:
                reason_to_skip(self._reader.source, location, error)
                continue
            if self._is_in_split(key):
                yield task
        raise DataError(f"{self._target} ended after {number} rows: it is not endless (data.endless=false)")
