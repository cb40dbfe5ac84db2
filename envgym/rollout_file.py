"""Episodes as a compressed columnar file (Parquet): one row an episode, tokens and masks included."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import missing_package
from .types import Episode, Message, Row


def write_rollouts(path: Path, episodes: Sequence[Episode]) -> None:
    """Write episodes to `path` in one rename. `schema` below names the columns."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package("pyarrow", "train", "writing rollouts") from None
    version = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
    segment = pa.struct(
        [
            ("role", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("weights", pa.list_(pa.float32())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(version)),
            ("temperature", pa.float32()),
        ]
    )
    turn = pa.struct([("reward", pa.float64()), ("stop_reason", pa.string())])
    row = pa.struct([("objective", pa.string()), ("segments", pa.list_(segment)), ("turns", pa.list_(turn))])
    call = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string()), ("error", pa.string())])
    message = pa.struct([("role", pa.string()), ("text", pa.string()), ("tool_calls", pa.list_(call))])
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("env", pa.string()),
            ("task", pa.string()),
            ("answer", pa.string()),
            ("group", pa.string()),
            ("member", pa.int32()),
            ("seed", pa.int64()),
            ("attempt", pa.int32()),
            ("status", pa.string()),
            ("reason", pa.string()),
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
    table = pa.Table.from_pylist([_record(episode) for episode in episodes], schema)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def _record(episode: Episode) -> dict[str, Any]:
    return {
        "id": episode.id,
        "env": episode.env,
        "task": episode.task.key,
        "answer": None if episode.task.answer is None else str(episode.task.answer),
        "group": episode.group,
        "member": episode.member,
        "seed": episode.seed,
        "attempt": episode.attempt,
        "status": episode.outcome.status.value,
        "reason": episode.outcome.reason,
        "error": episode.outcome.message,
        "reward": episode.reward,
        "score": episode.score,
        "metrics": list(episode.metrics.items()),
        "seconds": episode.seconds,
        "fingerprints": list(episode.fingerprints.items()),
        "messages": [_message(message) for message in episode.messages],
        "rows": [_row(row) for row in episode.rows],
    }


def _message(message: Message) -> dict[str, Any]:
    calls = [
        {"id": c.id, "name": c.name, "arguments": json.dumps(c.arguments, default=str), "error": c.error}
        for c in message.tool_calls
    ]
    return {"role": message.role, "text": message.text, "tool_calls": calls}


def _row(row: Row) -> dict[str, Any]:
    return {
        "objective": row.objective.value,
        "turns": [{"reward": turn.reward, "stop_reason": turn.stop_reason.value} for turn in row.turns],
        "segments": [
            {
                "role": segment.role,
                "token_ids": segment.token_ids,
                "weights": segment.weights,
                "logprobs": segment.logprobs,
                "versions": [{"version": v.version, "start": v.start, "end": v.end} for v in segment.versions],
                "temperature": segment.temperature,
            }
            for segment in row.segments
        ],
    }
