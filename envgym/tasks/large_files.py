"""Content of large files outside of memory: a data set with images may be many times larger than that."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import mmap
import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count
from operator import not_
from pathlib import Path
from typing import Any, BinaryIO, Self
from zlib import crc32

from envgym.disk import cache_folder, flush_to_disk, publish, regular_file, work_folder
from envgym.errors import DataError, RunError, needs, reported_as

IN_MEMORY = 2**26
"""Bytes of a file's rows up to which they are in memory. A larger Parquet file is copied to the disk: to a temporary
file in $ENVGYM_CACHE, without a name, which goes when the process ends."""
BATCH_BYTES = 2**24
"""Approximate bytes of the rows of a table that are converted at a time."""

PIECE_BYTES = 2**20
"""Approximate bytes of lines that are read at a time."""


class LineFile:
    """The lines of a text file that are not blank, unmodified, by number from 0. A small file is in memory. Of a larger
    one the positions and checksums of its lines are, and they are read when needed: they must not change meanwhile.
    Concurrent reads are safe; one of a line that has changed raises `RunError`.

    `numbers` are the lines' numbers in the file, from 1. Raises `DataError` for a file that cannot be read.
    """

    def __init__(self, path: Path, limit: int | None) -> None:
        self._path, self.numbers = path, array("I")
        self._starts, self._checksums = array("Q"), array("I")
        with reported_as(DataError, f"{path} cannot be read"):
            self._file: BinaryIO = regular_file(path).open("rb")
            self._memory = self._file.read() if os.fstat(self._file.fileno()).st_size <= IN_MEMORY else None
            source: BinaryIO = self._file
            if self._memory is not None:
                self._file.close()
                source = io.BytesIO(self._memory)
            number = end = 0
            while (limit is None or len(self.numbers) < limit) and (lines := source.readlines(PIECE_BYTES)):
                are_rows = [*map(not_, map(bytes.isspace, lines))]
                self.numbers.extend(compress(count(number + 1), are_rows))
                self._starts.extend(compress(accumulate(map(len, lines), initial=end), are_rows))
                self._checksums.extend(map(crc32, compress(lines, are_rows)))
                number, end = number + len(lines), end + sum(map(len, lines))
        self._starts.append(end)
        if limit is not None:
            del self.numbers[limit:], self._checksums[limit:], self._starts[limit + 1 :]

    def __len__(self) -> int:
        return len(self.numbers)

    def line(self, index: int) -> bytes:
        """Raises `IndexError` past the end."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        text = self._text(index, index + 1)
        line = text[: text.find(b"\n") + 1 or None]  # blank lines may follow
        if crc32(line) != self._checksums[index]:
            change = "has changed since the file was first read"
            raise RunError(f"{self._path}:{self.numbers[index]} {change}: a run needs its data as it was at the start")
        return line

    def lines(self) -> Iterator[bytes]:
        """All lines in order."""
        start = 0
        while start < len(self):
            end = bisect_right(self._starts, self._starts[start] + PIECE_BYTES, start + 2) - 1
            lines = [line for line in io.BytesIO(self._text(start, end)) if not line.isspace()]
            if array("I", map(crc32, lines)) != self._checksums[start:end]:
                lines = [self.line(index) for index in range(start, end)]  # raises the error of a changed one
            yield from lines
            start = end

    def _text(self, start: int, end: int) -> bytes:
        """The file's part with the lines from `start` to before `end`."""
        first, last = self._starts[start], self._starts[end]
        if self._memory is not None:
            return self._memory[first:last]
        try:
            return os.pread(self._file.fileno(), last - first, first)
        except OSError as error:
            raise RunError(f"{self._path} cannot be read: {error.strerror}") from None

    def part(self, start: int, end: int) -> Self | None:
        """The file's lines from `start` to before `end`, which can be pickled; None for those of a small file."""
        if self._memory is not None:
            return None
        part = copy.copy(self)
        part.numbers, part._checksums = self.numbers[start:end], self._checksums[start:end]
        part._starts = self._starts[start : end + 1]
        return part

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with reported_as(RunError, f"{self._path} cannot be read"):
            self._file = regular_file(self._path).open("rb")

    def fingerprint(self) -> str:
        """A hash that changes with the lines."""
        return hashlib.sha256(self._starts.tobytes() + self._checksums.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The rows of a source that are used: their `indices`, the `keys` of their prompts, and `facts` (JSON)."""

    keys: Sequence[int]
    indices: Sequence[int]
    facts: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> RowIndex | None:
        """The index that was saved by this name, with its numbers mapped into memory; None without one."""
        folder = cache_folder("index") / name
        try:
            facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
            with (folder / "numbers").open("rb") as file:
                numbers = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("Q")
        except (OSError, ValueError):
            return None
        return cls(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :], facts)

    def saved(self, name: str) -> RowIndex:
        """The same index from the disk, or itself if it cannot be written."""
        with contextlib.suppress(OSError, RunError), work_folder(final := cache_folder("index") / name) as folder:
            (folder / "facts.json").write_text(json.dumps(self.facts), encoding="utf-8")
            with (folder / "numbers").open("wb") as file:
                for numbers in (self.keys, self.indices):
                    file.write(array("Q", numbers))
            flush_to_disk(folder)
            publish(folder, final)
        return self.load(name) or self


class Table:
    """A Parquet or Arrow file as a table: a small Parquet file in memory, others mapped into memory.

    Raises `DataError` for a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with needs("pyarrow", "train", f"reading {path}"):
            import pyarrow.ipc
            import pyarrow.parquet
        self._mapping: mmap.mmap | None = None
        try:
            if path.suffix == ".parquet":
                file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
                groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
                size = sum(group.total_byte_size for group in groups)
                self.data = file.read() if size <= IN_MEMORY else self._copied(file, size)
            else:
                with path.open("rb") as source:
                    self.data = self._mapped(source)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
            raise DataError(f"{path}: not {kind} file that can be read: {str(error).splitlines()[0]}") from None

    def release(self) -> None:
        """Give the memory of what was read back: the file has it."""
        if self._mapping is not None and hasattr(self._mapping, "madvise"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def _copied(self, file: Any, size: int) -> Any:
        """A Parquet file's table, in an Arrow file on the disk."""
        import pyarrow.ipc

        folder = cache_folder("rows")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as copy:
            with pyarrow.ipc.new_stream(copy, file.schema_arrow) as stream:
                for batch in file.iter_batches(batch_size(size, file.metadata.num_rows, 2**16), use_threads=False):
                    stream.write_batch(batch)
            copy.flush()
            pyarrow.default_memory_pool().release_unused()
            return self._mapped(copy)

    def _mapped(self, file: Any) -> Any:
        import pyarrow.ipc

        self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pyarrow.ipc.open_stream(pyarrow.py_buffer(self._mapping)).read_all()


def batch_size(n_bytes: int, n_rows: int, maximum: int) -> int:
    """Number of rows of a table to convert at a time, at most `maximum`."""
    return max(1, min(maximum, BATCH_BYTES * n_rows // max(1, n_bytes)))
