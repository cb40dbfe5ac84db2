"""The one encoding of an episode, as JSON's own types: journals, files, checkpoints and the wire are spellings of it.

JSON has no tuples, and in its objects no keys but strings; an answer `(1, 2)` that came back as `[1, 2]` would be
another. In what an environment's author put into a task, or a user into options, they are written as `{"$tuple": […]}`
and `{"$items": [[key, value], …]}`; so is an object with a key that begins with `$`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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

TUPLE, ITEMS = "$tuple", "$items"
PLAIN = (
    "id", "env", "group", "member", "seed", "attempt", "reward", "score", "score_is_reward", "answer", "seconds"
)  # fmt: skip
"""Fields of an episode that are numbers and text, and written as they are."""
FIELDS = {name: "group_id" if name == "group" else name for name in PLAIN}
"""Fields of an episode by their names in a record."""
PLAIN_OF_TASK = ("id", "difficulty", "seed", "env")


def encode(value: Any) -> Any:
    """Write plain Python values in what JSON has; anything else is left to who writes the JSON."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {ITEMS: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    return value


def decode(value: Any, other: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Read what `encode` wrote. Raises `ValueError` for what it does not write.

    `other`: readers of further objects `{"$name": …}`, by that name.
    """
    if isinstance(value, list):
        return [decode(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(decode(item, other) for item in _list(value[TUPLE]))
    if value.keys() == {ITEMS}:
        try:
            return {decode(key, other): decode(item, other) for key, item in map(_list, _list(value[ITEMS]))}
        except TypeError as error:
            raise ValueError(f"not keys and values: {error}") from None
    if other and len(value) == 1 and (read := other.get(next(iter(value)))):
        return read(next(iter(value.values())))
    return {key: decode(item, other) for key, item in value.items()}


def decode_mapping(value: Any) -> dict[str, Any]:
    """As `decode`, of names and their values. Raises `ValueError` also for anything else."""
    found = decode(value)
    if not isinstance(found, dict):
        raise ValueError("names and values are wanted, not a tuple")
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{TUPLE} and {ITEMS} hold lists")
    return value


def to_record(episode: Episode) -> dict[str, Any]:
    """Everything an episode holds but what scoring roles made of its rows, as JSON's own types.

    Messages have the form of OpenAI-compatible APIs, but that a call's arguments are a mapping, and that one which
    could not be read has its `error`. The task's answer and fields are encoded (`encode`); what is not of Python's
    plain kinds becomes text when it is written.
    """
    task = episode.task
    return {
        **{name: getattr(episode, field) for name, field in FIELDS.items()},
        "task": {
            **_values(task, PLAIN_OF_TASK),
            "prompt": task.prompt if isinstance(task.prompt, str) else [_message(message) for message in task.prompt],
            "answer": encode(task.answer),
            "fields": encode(task.fields),
        },
        "outcome": _values(episode.outcome),
        "metrics": dict(episode.metrics),
        "fingerprints": dict(episode.fingerprints),
        "messages": [_message(message) for message in episode.messages],
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
    """The episode that `to_record` made `record` of. Raises `KeyError`, `TypeError` or `ValueError` for what is not
    such a record."""
    task, outcome = record["task"], _known(Outcome, record["outcome"])
    return Episode(
        **{field: record[name] for name, field in FIELDS.items()},
        task=Task(
            **{name: task[name] for name in PLAIN_OF_TASK},
            prompt=task["prompt"] if isinstance(task["prompt"], str) else as_messages(task["prompt"]),
            answer=decode(task["answer"]),
            fields=decode_mapping(task["fields"]),
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


def _message(message: Message) -> dict[str, Any]:
    result = message.as_dict()
    for written, call in zip(result.get("tool_calls", ()), message.tool_calls, strict=True):
        if call.error:
            written["error"] = call.error
    return result


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
        tuple(VersionSpan(**_known(VersionSpan, span)) for span in record["versions"]),
        record["temperature"],
    )


def _values(of: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass, all of them unless `names` are given, as they are."""
    return {name: getattr(of, name) for name in names or (field.name for field in fields(of))}


def _known(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a dataclass has, all of them; others are a newer version's."""
    return {field.name: record[field.name] for field in fields(cls)}
