"""Reading what a stranger may have made: regular files that lie where they should, and no more than memory holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import DataError

SUMMARY = 4 * 2**20
"""Bytes of a summary or result: thousands of environments with their intervals."""
METRICS = 256 * 2**20
"""Bytes of `metrics.jsonl`: 100,000 steps of 2.5 KiB."""
RECORD = 2**20
"""Bytes of one of its lines, or of an event's: 20,000 numbers, or an episode of 10,000 turns."""
EVENTS = 32 * 2**20
"""Bytes of a step's events: 16,000 episodes of 2 KiB. As Python's objects they are ten times as large."""
TOKENIZER = 128 * 2**20
"""Bytes of a `tokenizer.json`: those of 260,000 tokens have 33 MiB."""
EPISODE = 32 * 2**20
"""Bytes of an episode in JSON: a million tokens with their log-probabilities."""
LISTED = 512 * 2**20
"""Bytes of what a list shows of a file's episodes: 700,000 of them."""
GROUP = 2**30
"""Bytes of a group of rows in a Parquet file, at 8 a value: 256 episodes of 160,000 tokens."""
ROW = 64 * 2**20
"""Bytes of one of its rows: four million tokens."""


def within(path: Path, roots: Iterable[Path]) -> bool:
    """Tell whether a path leads, through links too, to something at or below one of the `roots`."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(root) for root in roots)


def leads_out(path: Path) -> str:
    """Sentence about a path that is not `within`."""
    return f"{path} leads to {os.path.realpath(path)}, outside of what was named: it is not followed"


def regular(path: Path, roots: Iterable[Path], most: int | None = None) -> Path:
    """The path, of a regular file within the `roots` that holds at most so many bytes. Raises `DataError` otherwise: a
    pipe would be waited for, and a device has no end."""
    if not within(path, roots):
        raise DataError(leads_out(path))
    if not path.is_file():
        raise DataError(f"{path} is no file")
    if most is not None and path.stat().st_size > most:
        raise DataError(f"{path} is larger than {most >> 20} MiB: it is not read")
    return path


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text is; empty for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def whole_lines(path: Path, longest: int, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Lines of a file from a byte on: where each begins and ends, and the line, which is empty where it is longer than
    `longest` bytes. A last line that is still being written is left out."""
    with path.open("rb") as file:
        file.seek(offset)
        start = end = offset
        while piece := file.readline(longest):
            end += len(piece)
            if piece.endswith(b"\n"):
                yield start, end, piece if end - start <= longest else b""
                start = end


class Parquet:
    """A Parquet file whose texts stay the dictionaries that they are in the file until their size is known."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self.metadata = pq.read_metadata(path)  # some kilobytes a group, which need not be read with every row
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} is no file of episodes ({str(error).splitlines()[0]})") from None
        columns = [self.metadata.schema.column(number) for number in range(self.metadata.num_columns)]
        self._texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        self._widths = {column.path: max(8, column.length or 0) for column in columns}

    def read(self, groups: Sequence[int], columns: Sequence[str] | None = None) -> Any:
        """Groups of rows as a table. Raises `DataError` where it would be larger than `GROUP`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        size, begins = 0, tuple(f"{name}." for name in columns or ())
        for number in groups:
            group = self.metadata.row_group(number)
            for one in map(group.column, range(group.num_columns)):
                if columns is None or f"{one.path_in_schema}.".startswith(begins):
                    size += max(one.total_uncompressed_size, one.num_values * self._widths[one.path_in_schema])
        if size > GROUP:
            raise DataError(f"{self.path} unpacks to more than {GROUP >> 20} MiB: it is not read")
        try:
            file = pq.ParquetFile(self.path, metadata=self.metadata, read_dictionary=self._texts)
            tables = [file.read_row_group(number, columns=columns) for number in groups]
            return pa.concat_tables(tables) if tables else file.read(columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read ({str(error).splitlines()[0]})") from None


def written_out(array: Any) -> int:
    """Bytes of an Arrow array once its dictionaries are written out."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.ChunkedArray):
        return sum(map(written_out, array.chunks))
    if pa.types.is_dictionary(array.type):
        return pc.sum(pc.take(pc.binary_length(array.dictionary), array.indices)).as_py() or 0
    if pa.types.is_map(array.type):
        return written_out(array.keys) + written_out(array.items)
    if pa.types.is_struct(array.type):
        return sum(map(written_out, array.flatten()))
    if pa.types.is_nested(array.type):
        return written_out(array.flatten())
    return int(array.nbytes)
