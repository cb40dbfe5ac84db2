"""Tasks from the user's own file: JSONL or Parquet, any field names, split into train and held-out by prompt."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .errors import DataError, did_you_mean, missing_package
from .types import Message, Task, as_messages

PROMPT_FIELDS = ("prompt", "question", "problem", "input", "query", "messages")
ANSWER_FIELDS = (
    "answer", "solution", "label", "target", "ground_truth", "gold", "expected_answer", "output", "response",
)  # fmt: skip


class DataConfig(BaseModel):
    """Where tasks come from, and which field is which."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """A JSONL file (one JSON object a line), or a Parquet file (`.parquet`)."""
    prompt: str | None = None
    """Field of the prompt: text, or a list of chat messages. Unset: the first of the usual names the file has."""
    answer: str | None = None
    """Field of the answer: text or a number. Unset: the first of the usual names the file has."""
    id: str | None = None
    """Field of the task's id, which must be unique. Unset: the file's name and the line number."""
    test_path: str | None = None
    """A file of held-out tasks, with the same fields. Prompts in it are dropped from `path`."""
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the distinct prompts that is held out where there is no `test_path`."""


@dataclass(frozen=True, slots=True)
class TaskSplits:
    """Train and held-out tasks, which share no prompt; `dropped` train tasks were in the held-out file."""

    train: list[Task]
    test: list[Task]
    dropped: int = 0


def load_tasks(config: DataConfig) -> TaskSplits:
    """Read and split the tasks that `config` describes.

    Raises `DataError` naming the file and the line of what is wrong. Reads whole files: call it in a thread.
    """
    tasks = _read(Path(config.path), config)
    if config.test_path is None:
        return _split(tasks, config)
    test = _read(Path(config.test_path), config)
    held_out = {prompt_key(task) for task in test}
    train = [task for task in tasks if prompt_key(task) not in held_out]
    if not train:
        raise DataError(f"{config.path}: every prompt is also in {config.test_path}, so there is nothing to train on")
    dropped = len(tasks) - len(train)
    if dropped:
        logging.getLogger(__name__).warning(
            "%d of the %d tasks of %s are also in %s: they are not trained on",
            dropped, len(tasks), config.path, config.test_path,
        )  # fmt: skip
    return TaskSplits(train, test, dropped)


def prompt_key(task: Task) -> str:
    """A hash of what `task` asks, the same on every machine; spacing does not count."""
    words = [f"{message.role} {' '.join(message.text.split())}" for message in as_messages(task.prompt)]
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()


def _split(tasks: list[Task], config: DataConfig) -> TaskSplits:
    """Hold out the prompts whose hash is small: duplicates stay together, and new rows move none of the old."""
    keys = sorted({prompt_key(task) for task in tasks})
    held_out = {key for key in keys if int(key[:15], 16) / 16**15 < config.test_fraction}
    if config.test_fraction > 0:
        if len(keys) == 1:
            raise DataError(
                f"{config.path}: all rows have one prompt, so none can be held out: "
                "set data.test_path, or data.test_fraction=0 to train without"
            )
        # Of a handful of prompts the share may be none or all: keep one on either side.
        held_out = (held_out | {keys[0]}) - {keys[-1]}
    test = [task for task in tasks if prompt_key(task) in held_out]
    return TaskSplits([task for task in tasks if prompt_key(task) not in held_out], test)


def _read(path: Path, config: DataConfig) -> list[Task]:
    if path.is_dir():
        raise DataError(f"{path} is a folder: data.path names one JSONL or Parquet file")
    if not path.is_file():
        raise DataError(f"there is no data file {path}")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    prompt_field = answer_field = None
    for line, row in rows:
        where = f"{path}:{line}"
        # The first row decides which of the usual names this file uses.
        prompt_field = prompt_field or config.prompt or _usual(row, PROMPT_FIELDS, "prompt", where)
        answer_field = answer_field or config.answer or _usual(row, ANSWER_FIELDS, "answer", where)
        prompt = _prompt(_value(row, prompt_field, where), prompt_field, where)
        answer = _answer(_value(row, answer_field, where), answer_field, where)
        id = str(_value(row, config.id, where)) if config.id else f"{path.stem}-{line}"
        if id in lines:
            raise DataError(f"{where}: the id {id!r} is also that of line {lines[id]}")
        lines[id] = line
        rest = {key: value for key, value in row.items() if key not in (prompt_field, answer_field, config.id)}
        tasks.append(Task(id=id, prompt=prompt, answer=answer, fields=rest))
    if not tasks:
        raise DataError(f"{path} holds no rows")
    return tasks


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets 10,000 deep
                raise DataError(f"{where}: not usable JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: a row is one JSON object, {{…}}, not a {type(row).__name__}")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_package("pyarrow", "train", f"reading {path}") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from None
    yield from enumerate(rows, start=1)


def _usual(row: dict[str, Any], names: tuple[str, ...], role: str, where: str) -> str:
    for name in names:
        if name in row:
            return name
    raise DataError(f"{where}: no {role} field; the row has {_list(row)}: say which it is with data.{role}=FIELD")


def _value(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: the row has no field {name!r}, only {_list(row)}.{did_you_mean(name, row)}")
    return row[name]


def _prompt(value: Any, name: str, where: str) -> str | tuple[Message, ...]:
    try:
        if not isinstance(value, str | list):
            raise TypeError(f"a prompt is text or a list of messages, not {type(value).__name__}")
        messages = as_messages(value)
    except (TypeError, KeyError) as error:
        raise DataError(f"{where}: field {name!r}: {error}") from None
    if not any(message.text.strip() for message in messages):
        raise DataError(f"{where}: field {name!r} is empty")
    return value if isinstance(value, str) else messages


def _answer(value: Any, name: str, where: str) -> str | int | float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: field {name!r}: an answer is text or a number, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: field {name!r}: an answer must be finite, not {value}")
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{where}: field {name!r} is empty")
    return value


def _list(row: dict[str, Any]) -> str:
    return ", ".join(row) or "no fields"
