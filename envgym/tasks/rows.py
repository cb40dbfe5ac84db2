"""Rows by number, of a file's lines, of a table, or of several files in order; and the data at a path: one file, a
folder of shards, or a folder with splits, such as `datasets` saves.

Rows stay in their stored form (text, columns) and are parsed when read: a million parsed rows would take several times
the memory.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from envgym.errors import DataError, did_you_mean
from envgym.hashing import text_hash
from envgym.types.conversations import ROLES

from .hub import fetch_data_set, is_hub_id
from .large_files import LineFile, Table, batch_size

Row = dict[str, Any]
BATCH = 1000
"""Rows of a table per conversion, when all are read."""
SHARDS = (".jsonl", ".parquet", ".csv")
TABLES = (".parquet", ".arrow")
CALL_KEYS = {"arguments", "parameters"}
"""Keys of a tool call, and of a tool's description, for objects whose keys differ from row to row."""
CONTENTS = {"content", "value", "tool_calls", "function_call"}
TRAIN = "train"
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of held-out splits, in order of preference."""
_decode = json.JSONDecoder().raw_decode
_NUMBERED = re.compile(r"[-_.]?\d+(-of-\d+)?$")


class RowLeftOut(Exception):
    """A row without a mistake that is no task, for the reason in the message; it is counted, and not used."""


class Rows(ABC):
    """Rows by number from 0, of a file or function `source`; ids of tasks consist of `stem` and a row's line."""

    def __init__(self, source: Path | str, stem: str) -> None:
        self._source, self._stem = str(source), stem

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """The row at `index`. Raises `DataError` for an unreadable row, `IndexError` past the end."""

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))  # unlike a generator, it continues after an error

    def origin(self, index: int) -> tuple[str, str, int]:
        """The row's source, the stem of its id, and its line in the source, from 1."""
        return self._source, self._stem, index + 1

    def location(self, index: int) -> str:
        """The row's source and line, for messages."""
        source, _, line = self.origin(index)
        return f"{source}:{line}"

    def name(self, index: int) -> str:
        """The id of the row's task, unless a field has it."""
        _, stem, line = self.origin(index)
        return f"{stem}-{line}"

    def part(self, start: int, end: int) -> Rows | None:
        """The rows from `start` to before `end`, which can be pickled; None for those that cannot."""
        return None

    def fingerprint(self) -> str | None:
        """A hash that changes with the rows; None for those of a function, and of files that are in memory parsed."""
        return None


class JsonLines(LineFile, Rows):
    """A file with one JSON object per line."""

    def __init__(self, path: Path, stem: str, limit: int | None) -> None:
        Rows.__init__(self, path, stem)
        LineFile.__init__(self, path, limit)

    def __getitem__(self, index: int) -> Row:
        return self._row(index, self.line(index))

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, itertools.count(), self.lines())

    def origin(self, index: int) -> tuple[str, str, int]:
        return self._source, self._stem, self.numbers[index]

    def _decoded(self, index: int, line: bytes) -> str:
        try:
            return line.decode("utf-8" if index or self.numbers[0] > 1 else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.location(index)}: not UTF-8 text ({error.reason} at byte {error.start})") from None

    def _row(self, index: int, line: bytes) -> Row:
        text = self._decoded(index, line)
        try:
            row, end = _decode(text) if text.startswith("{") else (None, 0)
            if text[end:] != "\n":  # as it is seldom: loads, which also reads spaces, takes twice the time
                row = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.location(index)}: not JSON: {_problem(error)}") from None
        except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets 10,000 deep
            raise DataError(f"{self.location(index)}: not usable JSON: {error}") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise DataError(f"{self.location(index)}: a row is one JSON object, {{…}}, not a {kind}")
        return row


class TextLines(JsonLines):
    """A text file with one document per line, in the field `text`."""

    def _row(self, index: int, line: bytes) -> Row:
        return {"text": self._decoded(index, line).rstrip("\r\n")}


class TableRows(Rows):
    """A Parquet or an Arrow file, by columns."""

    def __init__(self, path: Path, stem: str, limit: int | None) -> None:
        super().__init__(path, stem)
        self._file = Table(path)
        table = self._file.data
        self._table = table if limit is None else table.slice(0, limit)
        # Structs have every key of any row, with nulls where a row has none.
        self._calls = [column.name for column in table.schema if any(key in str(column.type) for key in CALL_KEYS)]
        self._maps = [column.name for column in table.schema if "map<" in str(column.type)]

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        [row] = self._table.slice(index, 1).to_pylist()
        self._file.release()
        return self._clean(row)

    def fingerprint(self) -> str:
        with Path(self._source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __iter__(self) -> Iterator[Row]:
        table = self._table
        for batch in table.to_batches(max_chunksize=batch_size(table.nbytes, len(self), BATCH)):
            yield from map(self._clean, batch.to_pylist())
            self._file.release()

    def _clean(self, row: Row) -> Row:
        row = row | {name: _without_nulls(row[name]) for name in self._calls}
        return row | {name: _without_tuples(row[name]) for name in self._maps}


class ListedRows(Rows):
    """Rows in memory, such as those of a generator."""

    def __init__(self, rows: Sequence[Row], source: str, stem: str) -> None:
        super().__init__(source, stem)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


class CSVRows(ListedRows):
    """The rows of a CSV file, in memory."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        if None in row or None in row.values():
            number = f"{self._source}, row {index + 1}"
            raise DataError(f"{number}: it has more or fewer values than the first line has names")
        return row


class ChainedRows(Rows):
    """The rows of several files in order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        number, offset = locate(self._ends, index)
        return self._parts[number][offset]

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(self._parts)

    def origin(self, index: int) -> tuple[str, str, int]:
        number, offset = locate(self._ends, index)
        return self._parts[number].origin(offset)

    def part(self, start: int, end: int) -> Rows | None:
        parts = []
        for last, rows in zip(self._ends, self._parts, strict=True):
            first = last - len(rows)
            if (part := rows.part(max(0, start - first), max(0, end - first))) is None:
                return None
            parts.append(part)
        return ChainedRows(parts)

    def fingerprint(self) -> str | None:
        return text_hash("".join(parts)) if all(parts := [part.fingerprint() or "" for part in self._parts]) else None


def _without_tuples(value: Any) -> Any:
    """A map's pairs as lists: the fields of a task hold no tuples."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    return [_without_tuples(item) for item in value] if isinstance(value, list | tuple) else value


def locate(ends: Sequence[int], index: int) -> tuple[int, int]:
    """The number of the part that holds `index`, and the index within it, for parts that end at `ends`. Raises
    `IndexError` past the end."""
    if not ends or not 0 <= index < ends[-1]:
        raise IndexError(index)
    number = bisect_right(ends, index)
    return number, index - (ends[number - 1] if number else 0)


def parse_json(value: Any, subject: str, *, may_be_text: bool = False) -> Any:
    """Parse text that holds a list as JSON, or as the Python literal that some programs write instead. A single object
    becomes a list of one. Any other value is returned unchanged, and with `may_be_text` all text but messages.

    Raises `DataError` with the place of the mistake for broken JSON that may not be text.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        items = json.loads(value)
    except (ValueError, RecursionError) as error:
        try:
            items = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            if may_be_text:
                return value
            problem = _problem(error) if isinstance(error, json.JSONDecodeError) else error
            raise DataError(f"{subject}: not JSON: {problem}") from None
    items = items if isinstance(items, list) else [items]
    return items if not may_be_text or _are_messages(items) else value


def _are_messages(items: Sequence[Any]) -> bool:
    """True for messages: all have a content or a call, and one a known role. Records such as `{"role": "admin",
    "name": "Ada"}` are none."""
    have_contents = all(isinstance(item, dict) and item.keys() & CONTENTS for item in items)
    return have_contents and any(str(item.get("role", item.get("from"))).strip().lower() in ROLES for item in items)


def _without_nulls(value: Any, is_call: bool = False) -> Any:
    """The value without the keys of calls and tools that are null."""
    if isinstance(value, list):
        return [_without_nulls(item, is_call) for item in value]
    if not isinstance(value, dict):
        return value
    is_call = is_call or bool(CALL_KEYS & value.keys())
    return {key: _without_nulls(item, is_call) for key, item in value.items() if item is not None or not is_call}


def _problem(error: json.JSONDecodeError) -> str:
    """The problem of a line that is not JSON. A truncated line's is at its end, not where its last string began."""
    end = len(error.doc.rstrip())
    if error.pos >= end or error.msg.startswith("Unterminated string"):
        return f"it is truncated at column {end}: …{error.doc[:end][-20:]}"
    return f"{error.msg} at column {error.colno}"


# -- Files and folders -------------------------------------------------------------------------------------------------


def open_rows(path: Path, split: str | None = None, limit: int | None = None) -> Rows:
    """The first `limit` rows of the file or folder at `path`, or of one of its splits.

    Without `split` that is `train`, or everything if there are no splits. Raises `DataError`.
    """
    path = local_path(path)
    if not path.is_dir():
        if split is not None:
            raise DataError(f"{path} is not a folder with splits, so there is no split {split!r} in it")
        return _open_file(path, path.stem, limit)
    splits = splits_of(path)
    if split is None and TRAIN in splits:
        split = TRAIN
    if split is None and (is_saved_dict(path) or any(name in splits for name in HELD_OUT)):
        raise DataError(f"{path} has the splits {', '.join(splits)}: choose one with data.split")
    if split is not None and split not in splits:
        available = f"only {', '.join(splits)}" if splits else "as it has no splits"
        raise DataError(f"{path} has no split {split!r}, {available}.{did_you_mean(split, splits)}")
    parts: list[Rows] = []
    for file in _files(path, split):
        remaining = None if limit is None else limit - sum(map(len, parts))
        if remaining != 0:
            # Files with equal names in different folders need different ids.
            parts.append(_open_file(file, _stem(path, file), remaining))
    return ChainedRows(parts)


def local_path(path: Path) -> Path:
    """The path itself, or the local folder of a data set of the hub."""
    return fetch_data_set(str(path)) if is_hub_id(str(path)) else path


def splits_of(path: Path) -> list[str]:
    """The names of the splits in a folder; empty for a file, or a folder with a single data set."""
    path = local_path(path)
    if not path.is_dir() or _is_saved(path):
        return []
    if is_saved_dict(path):
        return [str(name) for name in _read_json(path / "dataset_dict.json", "splits")]
    names = dict.fromkeys(_split_name(path, file) for file in _shards(path))
    return list(names) if len(names) > 1 or names.keys() & {TRAIN, *HELD_OUT} else []


def test_split_of(path: Path, split: str | None) -> str | None:
    """The held-out split for training on `split`: the first of the usual names that the folder has. None without
    one."""
    splits = splits_of(path)
    return next((name for name in HELD_OUT if name in splits and name != split), None)


def is_saved_dict(path: Path) -> bool:
    """True if `datasets` saved a DatasetDict here."""
    return (path / "dataset_dict.json").is_file()


def _is_saved(path: Path) -> bool:
    return (path / "state.json").is_file()


def _files(path: Path, split: str | None) -> list[Path]:
    """The data files of a folder, in order."""
    if _is_saved(path):
        files = [path / str(entry["filename"]) for entry in _read_json(path / "state.json", "_data_files")]
    elif is_saved_dict(path):
        files = _files(path / str(split), None)
    else:
        files = [file for file in _shards(path) if split is None or _split_name(path, file) == split]
    if not files:
        raise DataError(f"{path} holds no data: neither .jsonl or .parquet files nor a data set saved by `datasets`")
    return files


def _shards(path: Path) -> list[Path]:
    files = [file for suffix in SHARDS for file in path.rglob(f"*{suffix}")]
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))


def _split_name(path: Path, file: Path) -> str:
    """The shard's sub-folder, or its name without its number; hub folders have their shards in `data`."""
    folders = [part for part in file.relative_to(path).parts[:-1] if part != "data"]
    return folders[0] if folders else _NUMBERED.sub("", file.stem)


def _stem(path: Path, file: Path) -> str:
    if _is_saved(path) or is_saved_dict(path):
        return f"{file.parent.name}-{file.stem}"
    return file.relative_to(path).with_suffix("").as_posix()


def _open_file(path: Path, stem: str, limit: int | None) -> Rows:
    if not path.is_file():
        reason = " (it is no regular file)" if path.exists() else ""
        raise DataError(f"there is no data file {path}{reason}")
    if path.suffix == ".csv":
        return _read_csv(path, stem, limit)
    if path.suffix == ".json" and (rows := _read_list(path)) is not None:
        return ListedRows(rows[:limit], str(path), stem)
    return TableRows(path, stem, limit) if path.suffix in TABLES else JsonLines(path, stem, limit)


def _read_csv(path: Path, stem: str, limit: int | None) -> Rows:
    """The rows of a CSV file, whose first line names the fields. All values are text."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(itertools.islice(reader, limit))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a CSV file that can be read: {error}") from None
    return CSVRows(rows, str(path), stem)


def _read_list(path: Path) -> list[Row] | None:
    """The objects of a file that is one JSON list; None for other files, which may have one object per line."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) and all(isinstance(row, dict) for row in value) else None


def _read_json(path: Path, key: str) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not in the format of `datasets` ({error!r:.100})") from None
    if not isinstance(value, list):
        raise DataError(f"{path}: not in the format of `datasets` ({key} is no list)")
    return value
