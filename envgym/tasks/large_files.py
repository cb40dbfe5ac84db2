"""Content of large files outside of memory: a data set with images may be many times larger than that."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

from envgym.disk import cache_folder
from envgym.errors import DataError, needs

IN_MEMORY = 2**26
"""Bytes of a file's rows up to which they are in memory. Larger ones are copied to the disk: to a temporary file in
$ENVGYM_CACHE, without a name, which goes when the process ends."""
BATCH_BYTES = 2**24
"""Approximate bytes of the rows of a table that are converted at a time."""


class Text:
    """The content of a text file of `size` bytes: written in order, then read in pieces. Concurrent reads are safe."""

    def __init__(self, size: int) -> None:
        self._memory = bytearray()
        self._file = _temporary_file() if size > IN_MEMORY else None
        self.length = 0

    def append(self, line: bytes) -> None:
        self.length += len(line)
        if self._file is None:
            self._memory += line
        else:
            self._file.write(line)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, the end excluded."""
        if self._file is None:
            return bytes(self._memory[start:end])
        self._file.flush()
        return os.pread(self._file.fileno(), end - start, start)


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

    def batch_size(self, maximum: int) -> int:
        """Number of rows to convert at a time, at most `maximum`."""
        return _batch_size(self.data.nbytes, self.data.num_rows, maximum)

    def release(self) -> None:
        """Give the memory of what was read back: the file has it."""
        if self._mapping is not None and hasattr(self._mapping, "madvise"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def _copied(self, file: Any, size: int) -> Any:
        """A Parquet file's table, in an Arrow file on the disk."""
        import pyarrow.ipc

        with _temporary_file() as copy:
            with pyarrow.ipc.new_stream(copy, file.schema_arrow) as stream:
                for batch in file.iter_batches(_batch_size(size, file.metadata.num_rows, 2**16), use_threads=False):
                    stream.write_batch(batch)
            copy.flush()
            pyarrow.default_memory_pool().release_unused()
            return self._mapped(copy)

    def _mapped(self, file: Any) -> Any:
        import pyarrow.ipc

        self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pyarrow.ipc.open_stream(pyarrow.py_buffer(self._mapping)).read_all()


def _batch_size(n_bytes: int, n_rows: int, maximum: int) -> int:
    return max(1, min(maximum, BATCH_BYTES * n_rows // max(1, n_bytes)))


def _temporary_file() -> Any:
    folder = cache_folder("rows")
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)
