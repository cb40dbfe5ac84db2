"""Episodes as a compressed columnar file (Parquet): one row an episode, tokens and masks included."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.errors import DataError, missing_package
from envgym.types import Episode

from .record import from_record, to_record


def write_rollouts(path: Path, episodes: Sequence[Episode]) -> None:
    """Write episodes to `path` in one rename. `_schema` names the columns.

    What `envgym.episodes.record` keeps is kept, but not whose a score is (`score_is_reward`); log-probabilities with
    the precision of a float32.
    """
    pa, pq = _pyarrow("writing rollouts")
    written: dict[int, str] = {}  # a task, which the members of a group share, is written out once
    table = pa.Table.from_pylist([_columns(episode, written) for episode in episodes], _schema(pa))
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def read_rollouts(path: Path) -> list[Episode]:
    """The episodes of a file that `write_rollouts` wrote, in its order. Raises `DataError` for another file."""
    pa, pq = _pyarrow("reading rollouts")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as a Parquet file of episodes ({reason})") from None
    if missing := [name for name in _schema(pa).names if name not in table.column_names]:
        if {"task", "messages", "rows"} <= set(table.column_names):
            raise DataError(
                f"{path} was written by an earlier version, whose episodes cannot be read back: it has no column "
                f"{missing[0]!r}"
            )
        raise DataError(f"{path} holds no episodes: it has no column {missing[0]!r}")
    episodes = []
    for number, columns in enumerate(table.to_pylist(), 1):
        try:
            episodes.append(from_record(_record(columns)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}, row {number}: this is not an episode ({type(error).__name__}: {error})") from None
    return episodes


def _pyarrow(purpose: str) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package("pyarrow", "train", purpose) from None
    return pa, pq


def _schema(pa: Any) -> Any:
    version = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
    segment = pa.struct(
        [
            ("role", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("weights", pa.list_(pa.float64())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(version)),
            ("temperature", pa.float64()),
        ]
    )
    turn = pa.struct([("reward", pa.float64()), ("stop_reason", pa.string())])
    row = pa.struct([("objective", pa.string()), ("segments", pa.list_(segment)), ("turns", pa.list_(turn))])
    call = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string()), ("error", pa.string())])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("text", pa.string()),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", pa.string()),
            ("name", pa.string()),
        ]
    )
    return pa.schema(
        [
            ("id", pa.string()),
            ("env", pa.string()),
            ("task", pa.string()),  # its key
            ("answer", pa.string()),  # the task's, as text
            ("policy_answer", pa.string()),
            ("task_json", pa.string()),  # the whole task
            ("group", pa.string()),
            ("member", pa.int32()),
            ("seed", pa.int64()),
            ("attempt", pa.int32()),
            ("status", pa.string()),
            ("reason", pa.string()),
            ("retryable", pa.bool_()),
            ("error", pa.string()),
            ("reward", pa.float64()),
            ("score", pa.float64()),
            ("metrics", pa.map_(pa.string(), pa.float64())),
            ("seconds", pa.float64()),
            ("fingerprints", pa.map_(pa.string(), pa.string())),
            ("messages", pa.list_(message)),
            ("rows", pa.list_(row)),
        ]
    )


SAME = ("id", "env", "group", "member", "seed", "attempt", "reward", "score", "seconds", "rows")
"""Columns that are an episode's record under the same name and in the same form."""


def _columns(episode: Episode, written: dict[int, str]) -> dict[str, Any]:
    record = to_record(episode)
    outcome = record["outcome"]
    if (task := written.get(id(episode.task))) is None:
        task = written[id(episode.task)] = json.dumps(record["task"], default=str)
    return {
        **{name: record[name] for name in SAME},
        "task": episode.task.key,
        "answer": None if episode.task.answer is None else str(episode.task.answer),
        "policy_answer": record["answer"],
        "task_json": task,
        "status": outcome["status"],
        "reason": outcome["reason"],
        "retryable": outcome["retryable"],
        "error": outcome["message"],
        "metrics": list(record["metrics"].items()),
        "fingerprints": list(record["fingerprints"].items()),
        "messages": [_message_columns(message) for message in record["messages"]],
    }


def _record(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_columns`."""
    return {
        **{name: columns[name] for name in SAME},
        "task": json.loads(columns["task_json"]),
        "outcome": {
            "status": columns["status"],
            "reason": columns["reason"],
            "retryable": columns["retryable"],
            "message": columns["error"],
        },
        "answer": columns["policy_answer"],
        "metrics": dict(columns["metrics"]),
        "fingerprints": dict(columns["fingerprints"]),
        "messages": [_message(message) for message in columns["messages"]],
    }


def _message_columns(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"], default=str),
            "error": call.get("error", ""),
        }
        for call in message.get("tool_calls", ())
    ]
    return {
        "role": message["role"],
        "text": message["content"],
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id", ""),
        "name": message.get("name", ""),
    }


def _message(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_message_columns`, in the form that `as_messages` takes."""
    calls = [
        {
            "id": call["id"],
            "function": {"name": call["name"], "arguments": call["arguments"]},
            "error": call["error"],
        }
        for call in columns["tool_calls"]
    ]
    ids = {"tool_call_id": columns["tool_call_id"], "name": columns["name"]}
    return {"role": columns["role"], "content": columns["text"], "tool_calls": calls, **ids}
