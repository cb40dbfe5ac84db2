"""Reads every row of a source once: which of them are used, and the keys of their prompts."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from envgym.errors import DataError
from envgym.processes.pool import Processes
from envgym.processes.runtime import CALL_SECONDS

from .columns import TaskReader, reason_to_skip
from .config import Selection
from .large_files import RowIndex
from .rows import Row, RowLeftOut, Rows

PART = 250_000
"""Minimum number of rows that a process is started for: reading them takes a second."""
FIRST = 1000
"""Rows that are read before processes start. The first of them that is used decides what the columns are."""


def read_rows(rows: Rows, reader: TaskReader, selection: Selection, limit: int | None) -> RowIndex:
    """Read all rows, or the first of them until `limit` are used; many rows of files of lines by a process per core.
    Raises `DataError` for the first bad row that is not to be skipped."""
    reading = PartReader(reader, selection)
    count = min(len(os.sched_getaffinity(0)), len(rows) // PART)
    is_whole = limit is None or limit >= len(rows)
    # Ids are compared with those of all other rows, and a form may be any code.
    if count < 2 or not is_whole or reader.source.id or reader.form:
        return reading.read(rows, limit=limit)
    bounds = [0, *(FIRST + (len(rows) - FIRST) * number // count for number in range(count + 1))]
    parts = [part for start, end in pairwise(bounds) if (part := rows.part(start, end)) is not None]
    if not parts or (first := reading.read(parts[0])).facts["reader"]["fields"] is None:
        return reading.read(rows)
    readings = _read_in_processes(parts[1:], bounds[1:-1], reader, selection)
    with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
        return _joined([first, *thread.submit(asyncio.run, readings).result()])


async def _read_in_processes(
    parts: Sequence[Rows], starts: Sequence[int], reader: TaskReader, selection: Selection
) -> list[RowIndex]:
    """The indices of parts of the rows, whose first ones are at `starts`. Raises the first part's error."""
    settings = {"reader": reader, "selection": selection}
    processes = Processes[PartReader](f"{__name__}:PartReader", settings, count=len(parts), name="rows")
    try:
        readings = [
            processes.run(lambda worker: worker.read(part, start), timeout=CALL_SECONDS)  # noqa: B023
            for part, start in zip(parts, starts, strict=True)
        ]
        indices = list[RowIndex]()
        for index in await asyncio.gather(*readings, return_exceptions=True):
            if isinstance(index, BaseException):
                raise index
            indices.append(index)
        return indices
    finally:
        await processes.close()


def _joined(parts: Sequence[RowIndex]) -> RowIndex:
    keys, indices = array("Q"), array("Q")
    left_out, notes = Counter[str](), Counter[str]()
    readers = [part.facts["reader"] for part in parts]
    for part, reader in zip(parts, readers, strict=True):
        keys.extend(part.keys)
        indices.extend(part.indices)
        left_out.update(part.facts["left out"])
        notes.update(reader["notes"])
    images = any(reader["images"] for reader in readers)
    return RowIndex(keys, indices, {"left out": left_out, "reader": {**readers[0], "notes": notes, "images": images}})


class PartReader:
    """Reads a source's rows, or a part of them in a process."""

    def __init__(self, reader: TaskReader, selection: Selection) -> None:
        self._reader, self._selection = reader, selection
        reader.notes.clear()

    def read(self, rows: Rows, start: int = 0, *, limit: int | None = None) -> RowIndex:
        """Read rows, of which the first has the index `start`."""
        reader, selection, settings = self._reader, self._selection, self._reader.source
        keys, indices = array("Q"), array("Q")
        left_out: Counter[str] = Counter()
        first_index: dict[str, int] = {}
        iterator = iter(rows)
        for index in range(len(rows)):
            if len(indices) == limit:
                break
            try:
                row = next(iterator)
                if selection and not _is_selected(row, selection, rows.location(index)):
                    continue
                key = reader.key(row) if settings.id is None else None
                if key is None:
                    task, key = reader.read(row, location := rows.location(index), rows.name(index))
                    if settings.id is not None and (first := first_index.setdefault(task.id, index)) != index:
                        line = rows.origin(first)[2]
                        raise DataError(f"{location}: the id {task.id!r} is also that of line {line}")
            except (RowLeftOut, DataError) as error:
                left_out[reason_to_skip(settings, rows.location(index), error)] += 1
            else:
                indices.append(start + index)
                keys.append(key)
        return RowIndex(keys, indices, {"left out": left_out, "reader": reader.facts()})


def _is_selected(row: Row, selection: Selection, location: str) -> bool:
    """True for a row with allowed values. Raises `DataError` for a row without such a field."""
    if missing := [name for name in selection if name not in row]:
        raise DataError(f"{location}: data.select names a field {missing[0]!r} that the row lacks")
    return all(row[name] in allowed for name, allowed in selection.items())
