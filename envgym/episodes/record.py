"""The record of an episode in JSON types, which journals, files, checkpoints and the wire share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from envgym.types import (
    Episode,
    Message,
    Objective,
    Outcome,
    Row,
    Segment,
    Status,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    as_messages,
)

PLAIN = (
    "id", "env", "group", "member", "seed", "attempt", "reward", "score", "score_is_reward", "answer", "seconds"
)  # fmt: skip
"""Record keys of an episode's numbers and texts, which are written unchanged."""
FIELDS = {name: "group_id" if name == "group" else name for name in PLAIN}
"""Record keys → fields of an episode."""
PLAIN_OF_TASK = ("id", "difficulty", "seed", "env")


def excerpt(messages: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The prompt and the completion among messages (role, text): the last text before the first answer, and the last
    answer."""
    prompt = completion = ""
    has_answer = False
    for role, text in messages:
        if role == "assistant":
            completion, has_answer = text, True
        elif not has_answer:
            prompt = text
    return prompt, completion


def to_record(episode: Episode) -> dict[str, Any]:
    """All data of an episode in JSON types, except the values that roles computed for its token sequences.

    Messages have the form of OpenAI-compatible APIs, except that the arguments of a tool call are a mapping, and that a
    malformed call has an `error`. Values of a task that have no JSON type (a date) become text when it is written.
    """
    task = episode.task
    return {
        **{name: getattr(episode, field) for name, field in FIELDS.items()},
        "task": {
            **_values(task, PLAIN_OF_TASK),
            "prompt": task.prompt if isinstance(task.prompt, str) else _messages(task.prompt),
            "answer": task.answer,
            "fields": dict(task.fields),
        },
        "outcome": _values(episode.outcome),
        "metrics": dict(episode.metrics),
        "fingerprints": dict(episode.fingerprints),
        "messages": _messages(episode.messages),
        "rows": [
            {
                "objective": row.objective.value,
                "turns": [_values(turn) for turn in row.turns],
                "segments": [_segment(segment) for segment in row.segments],
            }
            for row in episode.rows
        ],
    }


def from_record(record: Mapping[str, Any]) -> Episode:
    """The episode of a record from `to_record`. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    task, outcome = record["task"], _select_fields(Outcome, record["outcome"])
    return Episode(
        **{field: record[name] for name, field in FIELDS.items()},
        task=Task(
            **{name: task[name] for name in PLAIN_OF_TASK},
            prompt=task["prompt"] if isinstance(task["prompt"], str) else as_messages(task["prompt"]),
            answer=task["answer"],
            fields=task["fields"],
        ),
        outcome=Outcome(**{**outcome, "status": Status(outcome["status"])}),
        metrics=dict(record["metrics"]),
        fingerprints=dict(record["fingerprints"]),
        messages=list(as_messages(record["messages"])),
        rows=[
            Row(
                [_segment_of(segment) for segment in row["segments"]],
                Objective(row["objective"]),
                [Turn(turn["reward"], StopReason(turn["stop_reason"])) for turn in row["turns"]],
            )
            for row in record["rows"]
        ],
    )


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [message.as_dict(with_errors=True) for message in messages]


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "role": segment.role,
        "token_ids": list(segment.token_ids),
        "weights": list(segment.loss_weights),
        "logprobs": None if segment.logprobs is None else list(segment.logprobs),
        "versions": [_values(span) for span in segment.versions],
        "temperature": segment.temperature,
    }


def _segment_of(record: Mapping[str, Any]) -> Segment:
    return Segment(
        record["role"],
        record["token_ids"],
        record["weights"],
        record["logprobs"],
        tuple(VersionSpan(**_select_fields(VersionSpan, span)) for span in record["versions"]),
        record["temperature"],
    )


def _values(instance: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """The unchanged field values of a dataclass instance: those in `names`, or all."""
    return {name: getattr(instance, name) for name in names or (field.name for field in fields(instance))}


def _select_fields(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields of dataclass `cls`. Other keys, of newer versions, are dropped."""
    return {field.name: record[field.name] for field in fields(cls)}
