"""The record of an episode: in JSON types, which journals, files, checkpoints and the wire share, and in a compressed
columnar file (Parquet), one row per episode, tokens and masks included."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from envgym.disk import replacement_file
from envgym.errors import DataError, needs
from envgym.images import RECORDED, images_of
from envgym.types import (
    Episode,
    Group,
    ImagePart,
    ImageSpan,
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
from envgym.types.messages import change_images

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray

PLAIN = (
    "id", "env", "group", "member", "seed", "attempt", "reward", "score", "score_is_reward", "answer", "seconds"
)  # fmt: skip
"""Record keys of an episode's numbers and texts, which are written unchanged."""
FIELDS = {name: "group_id" if name == "group" else name for name in PLAIN}
"""Record keys → fields of an episode."""
PARENT = ("parent", "parent_turn")
"""Record keys of a branch."""
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


def to_record(episode: Episode, numbers: Callable[[array[Any]], Any] = list) -> dict[str, Any]:
    """All data of an episode in JSON types, except the values that roles computed for its token sequences. The numbers
    of its tokens are in the form that `numbers` gives an array.

    Messages have the form of OpenAI-compatible APIs, except that the arguments of a tool call are a mapping, and that a
    malformed call has an `error`. A message with images has `parts` too, and a segment `images`. Values of a task that
    have no JSON type (a date) become text when it is written.
    """
    task = episode.task
    return {
        **{name: getattr(episode, field) for name, field in FIELDS.items()},
        **(_values(episode, PARENT) if episode.parent else {}),
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
                "segments": [_segment(segment, numbers) for segment in row.segments],
            }
            for row in episode.rows
        ],
    }


def from_record(record: Mapping[str, Any], locate: Callable[[ImagePart], ImagePart] = lambda image: image) -> Episode:
    """The episode of a record from `to_record`; `locate` adds the files of images, of which it has the names alone.
    Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    task, outcome = record["task"], _select_fields(Outcome, record["outcome"])

    def read(messages: Any) -> tuple[Message, ...]:
        return change_images(as_messages(messages), locate)

    return Episode(
        **{field: record[name] for name, field in FIELDS.items()},
        **({name: record[name] for name in PARENT} if record.get("parent") else {}),
        task=Task(
            **{name: task[name] for name in PLAIN_OF_TASK},
            prompt=task["prompt"] if isinstance(task["prompt"], str) else read(task["prompt"]),
            answer=task["answer"],
            fields=task["fields"],
        ),
        outcome=Outcome(**{**outcome, "status": Status(outcome["status"])}),
        metrics=dict(record["metrics"]),
        fingerprints=dict(record["fingerprints"]),
        messages=list(read(record["messages"])),
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


def _segment(segment: Segment, numbers: Callable[[array[Any]], Any]) -> dict[str, Any]:
    return {
        "role": segment.role,
        "token_ids": numbers(segment.token_ids),
        "weights": numbers(segment.loss_weights),
        "logprobs": None if segment.logprobs is None else numbers(segment.logprobs),
        "versions": [_values(span) for span in segment.versions],
        "temperature": segment.temperature,
        **({"images": [image._asdict() for image in segment.images]} if segment.images else {}),
    }


def _segment_of(record: Mapping[str, Any]) -> Segment:
    return Segment(
        record["role"],
        record["token_ids"],
        record["weights"],
        record["logprobs"],
        tuple(VersionSpan(**_select_fields(VersionSpan, span)) for span in record["versions"]),
        record["temperature"],
        tuple(ImageSpan(image["sha256"], image["start"], image["length"]) for image in record.get("images") or ()),
    )


def _values(instance: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """The unchanged field values of a dataclass instance: those in `names`, or all."""
    return {name: getattr(instance, name) for name in names or (field.name for field in fields(instance))}


def _select_fields(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields of dataclass `cls`. Other keys, of newer versions, are dropped."""
    return {field.name: record[field.name] for field in fields(cls)}


ROW_GROUP_SIZE = 256
"""Episodes per row group, the smallest unit that a reader loads."""


def write_rollouts(path: Path, episodes: Sequence[Episode]) -> None:
    """Write episodes to `path` in one rename. Columns are the fields of `envgym.episodes.record`: the task and the
    arguments of tool calls as text (JSON), log-probabilities as float32. Further columns serve lists of episodes: the
    task's `key`, the number of sampled `tokens` and of `turns`, and `surprise`, the mean -log p of the tokens in
    nats."""
    pa, pq = _pyarrow("writing rollouts")
    tasks: dict[int, tuple[str, str]] = {}  # key and JSON by the task's `id`: the members of a group share the task
    has_parents = any(episode.parent for episode in episodes)
    rows = [_columns(episode, tasks) for episode in episodes]
    has_others = any("from_others" in message for row in rows for message in row["messages"])
    has_images = any("parts" in message for row in rows for message in row["messages"]) or any(
        row.images for episode in episodes for row in episode.rows
    )
    table = pa.Table.from_pylist(
        rows, _schema(pa, has_others=has_others, has_images=has_images, has_parents=has_parents)
    )
    with replacement_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_SIZE)


class LearnedRow(NamedTuple):
    """The training values of a row that was trained on, float32 [T]: its advantages, the log-probabilities of the
    trainer's policy in its first and its last optimizer step on it, those of the sampling policy, and the entropies of
    the first."""

    episode: str
    number: int
    advantages: FloatArray
    first: FloatArray | None
    last: FloatArray
    sampled: FloatArray
    entropies: FloatArray | None


def learned_values(groups: Sequence[Group]) -> list[LearnedRow]:
    """The training values of all rows that have advantages and were trained on."""
    return [
        LearnedRow(
            episode.id,
            number,
            row.arrays["advantages"],
            row.first_outputs,
            row.last_outputs,
            row.old_logprobs,
            row.entropies,
        )
        for group in groups
        for episode in group.episodes
        for number, row in enumerate(episode.rows)
        if row.last_outputs is not None and "advantages" in row.arrays
    ]


def write_learned(path: Path, rows: Sequence[LearnedRow]) -> None:
    """Write the training values of a step's rows to `path` in one rename, one line per row: the `episode`, the row's
    number in it (`row`), and one float32 per token in `advantages`, `logprobs` (the trainer's before its first
    optimizer step on the row, in nats), `ratios` (the trainer's policy of its last optimizer step over the sampling
    policy) and `entropies` (of the distributions before the first step, in nats). No file is written without rows."""
    import numpy as np

    if not rows:
        return
    pa, pq = _pyarrow("writing rollouts")
    ratios = [np.exp(np.where(np.isfinite(row.sampled), row.last - row.sampled, 0.0)) for row in rows]
    columns = {
        "episode": [row.episode for row in rows],
        "row": [row.number for row in rows],
        "advantages": [row.advantages for row in rows],
        "logprobs": [row.first for row in rows],
        "ratios": ratios,
        "entropies": [row.entropies for row in rows],
    }
    floats = pa.list_(pa.float32())
    types = {"episode": pa.string(), "row": pa.int32(), **dict.fromkeys(list(columns)[2:], floats)}
    table = pa.table(columns, pa.schema(list(types.items())))
    path.parent.mkdir(exist_ok=True)
    with replacement_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_SIZE)


def read_rollouts(path: Path) -> list[Episode]:
    """The episodes of a file that `write_rollouts` wrote, in order. Raises `DataError` for other files."""
    pa, pq = _pyarrow("reading rollouts")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as a Parquet file of episodes ({reason})") from None
    if missing := [name for name in _schema(pa).names if name not in table.column_names]:
        raise DataError(f"{path} holds no episodes: it has no column {missing[0]!r}")
    episodes = []
    images = images_of(path)
    for number, columns in enumerate(table.to_pylist(), 1):
        try:
            episodes.append(from_record({**columns, "task": json.loads(columns["task"])}, images.locate))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}, row {number}: this is not an episode ({type(error).__name__}: {error})") from None
    return episodes


@lru_cache(1024)
def image_names(path: Path) -> frozenset[str]:
    """The names of the images in a file of `write_rollouts`, as it was when it was first asked for."""
    _, pq = _pyarrow("reading rollouts")
    names = set[str]()
    with pq.ParquetFile(path) as file:
        if file.schema_arrow.field("messages").type.value_type.get_field_index("parts") >= 0:
            for batch in file.iter_batches(ROW_GROUP_SIZE, columns=["task", "messages"]):
                names.update(RECORDED.findall(json.dumps(batch.to_pylist()).replace('\\"', '"')))
    return frozenset(names)


def _pyarrow(purpose: str) -> tuple[Any, Any]:
    with needs("pyarrow", "train", purpose):
        import pyarrow as pa
        import pyarrow.parquet as pq
    return pa, pq


def _columns(episode: Episode, tasks: dict[int, tuple[str, str]]) -> dict[str, Any]:
    import numpy as np

    record = to_record(episode, np.asarray)  # Arrow copies its arrays of equal types
    for segment in itertools.chain.from_iterable(row["segments"] for row in record["rows"]):
        segment["weights"] = segment["weights"].astype(np.float64)
    if (task := tasks.get(id(episode.task))) is None:
        task = tasks[id(episode.task)] = episode.task.key, json.dumps(record["task"], default=str)
    for message in record["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], default=str)
        if "parts" in message:
            message["parts"] = json.dumps(message["parts"])
    maps = {name: list(record[name].items()) for name in ("metrics", "fingerprints")}
    segments = [segment for row in episode.rows for segment in row.segments]
    sampled = [segment.logprobs for segment in segments if segment.logprobs]
    summary = {
        "key": task[0],
        "tokens": sum([len(segment.token_ids) for segment in segments if segment.role == "action"]),
        "turns": sum(len(row.turns) for row in episode.rows),
        "surprise": -math.fsum(itertools.chain(*sampled)) / sum(map(len, sampled)) if sampled else None,
    }
    return {**record, **maps, **summary, "task": task[1]}


def _schema(pa: Any, *, has_others: bool = False, has_images: bool = False, has_parents: bool = False) -> Any:
    """The columns. With `has_others`, messages have the field `from_others`; with `has_images` they have `parts`, as
    JSON, and segments have `images`; with `has_parents` episodes have the columns `PARENT`."""
    text, number, integer, token, boolean = pa.string(), pa.float64(), pa.int64(), pa.int32(), pa.bool_()

    def struct(**columns: Any) -> Any:
        return pa.struct(list(columns.items()))

    call = struct(id=text, type=text, function=struct(name=text, arguments=text), error=text)
    mark = {"from_others": boolean} if has_others else {}
    mark |= {"parts": text} if has_images else {}
    images = {"images": pa.list_(struct(sha256=text, start=token, length=token))} if has_images else {}
    message = struct(role=text, content=text, tool_calls=pa.list_(call), tool_call_id=text, name=text, **mark)
    segment = struct(
        role=text,
        token_ids=pa.list_(token),
        weights=pa.list_(number),
        logprobs=pa.list_(pa.float32()),
        versions=pa.list_(struct(version=integer, start=token, end=token)),
        temperature=number,
        **images,
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
        outcome=struct(status=text, reason=text, retryable=boolean, message=text),
        reward=number,
        score=number,
        score_is_reward=boolean,
        answer=text,
        metrics=pa.map_(text, number),
        seconds=number,
        fingerprints=pa.map_(text, text),
        messages=pa.list_(message),
        rows=pa.list_(row),
        key=text,
        tokens=integer,
        turns=token,
        surprise=number,
    )
    parents = list(struct(parent=text, parent_turn=token)) if has_parents else []
    return pa.schema([*episode, *parents])
