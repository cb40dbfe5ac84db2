"""Reading of untrusted files: only regular files within the allowed folders, with limits on memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import DataError

SUMMARY = 4 * 2**20
"""Maximum bytes of a summary or result: thousands of environments with their intervals."""
METRICS = 256 * 2**20
"""Maximum bytes of `metrics.jsonl`: 100,000 steps of 2.5 KiB."""
RECORD = 2**20
"""Maximum bytes of a line of metrics or events: 20,000 numbers, or an episode of 10,000 turns."""
EVENTS = 32 * 2**20
"""Maximum bytes of a step's events: 16,000 episodes of 2 KiB. As Python objects they are ten times as large."""
TOKENIZER = 128 * 2**20
"""Maximum bytes of a `tokenizer.json`; 260,000 tokens take 33 MiB."""
TAIL = 2**14
"""Maximum bytes of the end of a log."""
EPISODE = 32 * 2**20
"""Maximum bytes of an episode in JSON: a million tokens with their log-probabilities."""
LISTED = 512 * 2**20
"""Maximum bytes of a file's list: 700,000 episodes."""
GROUP = 2**30
"""Maximum bytes of a row group in a Parquet file, at 8 per value: 256 episodes of 160,000 tokens."""
ROW = 64 * 2**20
"""Maximum bytes of a row in a Parquet file: four million tokens."""


def is_within(path: Path, roots: Iterable[Path]) -> bool:
    """True if a path, with its links resolved, is at or below one of the `roots`."""
    target = Path(os.path.realpath(path))
    return any(target.is_relative_to(root) for root in roots)


def leads_out(path: Path) -> str:
    """Error message for a path that is not `is_within`."""
    return f"{path} leads to {os.path.realpath(path)}, outside of what was named: it is not followed"


def regular(path: Path, roots: Iterable[Path], max_bytes: int | None = None) -> Path:
    """The path, if it is a regular file within the `roots` of at most `max_bytes`. Raises `DataError` otherwise: a pipe
    would block, and a device has no end."""
    if not is_within(path, roots):
        raise DataError(leads_out(path))
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise DataError(f"{path} is larger than {max_bytes >> 20} MiB: it is not read")
    return path


def complete_lines(path: Path, longest: int, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Lines of a file from a byte `offset` on, as (start, end, line); a line of more than `longest` bytes is empty. An
    incomplete last line is omitted."""
    with path.open("rb") as file:
        file.seek(offset)
        start = end = offset
        while piece := file.readline(longest):
            end += len(piece)
            if piece.endswith(b"\n"):
                yield start, end, piece if end - start <= longest else b""
                start = end


class Parquet:
    """A Parquet file whose texts stay dictionary-encoded until their size was checked."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self.metadata = pq.read_metadata(path)  # some kilobytes per row group, read once
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} is not a file of episodes ({str(error).splitlines()[0]})") from None
        columns = [self.metadata.schema.column(number) for number in range(self.metadata.num_columns)]
        self._texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        self._widths = {column.path: max(8, column.length or 0) for column in columns}

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> Any:
        """Row groups as a table. Raises `DataError` if it would be larger than `GROUP`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        size, prefixes = 0, tuple(f"{name}." for name in columns or ())
        for number in groups:
            group = self.metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                if columns is None or f"{column.path_in_schema}.".startswith(prefixes):
                    size += max(column.total_uncompressed_size, column.num_values * self._widths[column.path_in_schema])
        if size > GROUP:
            raise DataError(f"{self.path} unpacks to more than {GROUP >> 20} MiB: it is not read")
        try:
            file = pq.ParquetFile(self.path, metadata=self.metadata, read_dictionary=self._texts)
            tables = [file.read_row_group(number, columns=columns) for number in groups]
            return pa.concat_tables(tables) if tables else file.read(columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read ({str(error).splitlines()[0]})") from None


def unpacked_size(array: Any) -> int:
    """Bytes of an Arrow array after its dictionaries are decoded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        return sum(map(unpacked_size, array.chunks))
    if pa.types.is_dictionary(array.type):
        return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
    if pa.types.is_map(array.type):
        return unpacked_size(array.keys) + unpacked_size(array.items)
    if pa.types.is_struct(array.type):
        return sum(map(unpacked_size, array.flatten()))
    if pa.types.is_nested(array.type):
        return unpacked_size(array.flatten())
    return int(array.nbytes)
