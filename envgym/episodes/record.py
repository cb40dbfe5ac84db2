"""The encoding of an episode in JSON types, which journals, files, checkpoints and the wire share.

JSON has no tuples, and its objects have only string keys; an answer `(1, 2)` that came back as `[1, 2]` would be
different. In task values and options, tuples are written as `{"$tuple": […]}`, and mappings with other keys, or with a
key that begins with `$`, as `{"$items": [[key, value], …]}`.
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


def encode(value: Any) -> Any:
    """Encode plain Python values in JSON types. Other values stay unchanged: the caller's JSON encoder decides."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {ITEMS: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    return value


def decode(value: Any, readers: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Decode a value from `encode`. Raises `ValueError` if `encode` cannot have written it.

    `readers`: functions that decode further objects `{"$name": …}`, by that name.
    """
    if isinstance(value, list):
        return [decode(item, readers) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TUPLE}:
        return tuple(decode(item, readers) for item in _list(value[TUPLE]))
    if value.keys() == {ITEMS}:
        try:
            return {decode(key, readers): decode(item, readers) for key, item in map(_list, _list(value[ITEMS]))}
        except TypeError as error:
            raise ValueError(f"not keys and values: {error}") from None
    if readers and len(value) == 1 and (read := readers.get(next(iter(value)))):
        return read(next(iter(value.values())))
    return {key: decode(item, readers) for key, item in value.items()}


def decode_mapping(value: Any) -> dict[str, Any]:
    """Like `decode`, but raises `ValueError` also if the value is no mapping."""
    mapping = decode(value)
    if not isinstance(mapping, dict):
        raise ValueError("expected names and values, not a tuple")
    return mapping


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{TUPLE} and {ITEMS} hold lists")
    return value


def to_record(episode: Episode) -> dict[str, Any]:
    """All data of an episode in JSON types, except the values that roles computed for its token sequences.

    Messages have the form of OpenAI-compatible APIs, except that the arguments of a tool call are a mapping, and that a
    malformed call has an `error`. The task's answer and fields are encoded (`encode`); values that are not plain Python
    become text when the JSON is written.
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
    """The episode of a record from `to_record`. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    task, outcome = record["task"], _select_fields(Outcome, record["outcome"])
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
    for call_record, call in zip(result.get("tool_calls", ()), message.tool_calls, strict=True):
        if call.error:
            call_record["error"] = call.error
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
        tuple(VersionSpan(**_select_fields(VersionSpan, span)) for span in record["versions"]),
        record["temperature"],
    )


def _values(instance: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """The unchanged field values of a dataclass instance: those in `names`, or all."""
    return {name: getattr(instance, name) for name in names or (field.name for field in fields(instance))}


def _select_fields(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields of dataclass `cls`. Other keys, of newer versions, are dropped."""
    return {field.name: record[field.name] for field in fields(cls)}
