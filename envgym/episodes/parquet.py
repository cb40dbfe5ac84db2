"""Episodes as a compressed columnar file (Parquet): one row an episode, tokens and masks included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envgym.disk import replacing
from envgym.errors import DataError, missing_package
from envgym.types import Episode

from .record import from_record, to_record


def write_rollouts(path: Path, episodes: Sequence[Episode]) -> None:
    """Write episodes to `path` in one rename. Columns are the fields of `envgym.episodes.record`: the task and the
    arguments of tool calls as text (JSON), log-probabilities with the precision of a float32."""
    pa, pq = _pyarrow("writing rollouts")
    tasks: dict[int, str] = {}  # a task, which the members of a group share, is written out once
    table = pa.Table.from_pylist([_columns(episode, tasks) for episode in episodes], _schema(pa))
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_rollouts(path: Path) -> list[Episode]:
    """The episodes of a file that `write_rollouts` wrote, in its order. Raises `DataError` for another file."""
    pa, pq = _pyarrow("reading rollouts")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as a Parquet file of episodes ({reason})") from None
    if missing := [name for name in _schema(pa).names if name not in table.column_names]:
        raise DataError(f"{path} holds no episodes: it has no column {missing[0]!r}")
    episodes = []
    for number, columns in enumerate(table.to_pylist(), 1):
        try:
            episodes.append(from_record({**columns, "task": json.loads(columns["task"])}))
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


def _columns(episode: Episode, tasks: dict[int, str]) -> dict[str, Any]:
    record = to_record(episode)
    if (task := tasks.get(id(episode.task))) is None:
        task = tasks[id(episode.task)] = json.dumps(record["task"], default=str)
    for message in record["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], default=str)
    maps = {name: list(record[name].items()) for name in ("metrics", "fingerprints")}
    return {**record, **maps, "task": task}


def _schema(pa: Any) -> Any:
    text, number, integer, token, yes = pa.string(), pa.float64(), pa.int64(), pa.int32(), pa.bool_()

    def struct(**columns: Any) -> Any:
        return pa.struct(list(columns.items()))

    call = struct(id=text, type=text, function=struct(name=text, arguments=text), error=text)
    message = struct(role=text, content=text, tool_calls=pa.list_(call), tool_call_id=text, name=text)
    segment = struct(
        role=text,
        token_ids=pa.list_(token),
        weights=pa.list_(number),
        logprobs=pa.list_(pa.float32()),
        versions=pa.list_(struct(version=integer, start=token, end=token)),
        temperature=number,
    )
    turn = struct(reward=number, stop_reason=text)
    row = struct(objective=text, segments=pa.list_(segment), turns=pa.list_(turn))
    episode = struct(
        id=text,
        env=text,
        task=text,
        group=text,
        member=token,
        seed=integer,
        attempt=token,
        outcome=struct(status=text, reason=text, retryable=yes, message=text),
        reward=number,
        score=number,
        score_is_reward=yes,
        answer=text,
        metrics=pa.map_(text, number),
        seconds=number,
        fingerprints=pa.map_(text, text),
        messages=pa.list_(message),
        rows=pa.list_(row),
    )
    return pa.schema(list(episode))
