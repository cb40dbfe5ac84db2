"""Episodes for the page: the list of a file, and a single episode with its tokens, read without the others."""

from __future__ import annotations

import bisect
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from envgym.episodes.record import excerpt
from envgym.errors import DataError
from envgym.net.client import json_object
from envgym.render.renderer import check_tokenizer
from envgym.settings import leaves

from .reading import EPISODE, GROUP, LISTED, RECORD, ROW, Parquet, complete_lines, regular, unpacked_size
from .sources import Source

TEXTS = ("id", "key", "group", "env", "status", "reason")
NUMBERS = ("member", "attempt", "reward", "score", "seconds", "tokens", "turns", "surprise")
"""Columns of a list of episodes."""
OUTCOME = {"status": "outcome.status", "reason": "outcome.reason"}
"""Columns that are fields of a struct in a Parquet file."""
CACHED = 4
"""Number of files whose lists are cached."""
HISTORY = 4
"""Maximum number of a task's episodes per step and pass in its history."""
PASSES = ("eval", "eval-greedy")
"""The passes of an evaluation in a run: the parts of its groups' ids before the number."""
UNSTATED = "not in the completion"
TOKENS = 65536
"""Number of cached token texts."""
LONGEST = 1000
"""Maximum characters of a token's text."""
_Values: TypeAlias = list[tuple[int, float]]
"""A task's episodes: the index and the score of each."""


class Listing:
    """The episodes of a file: one value of each column per episode for the page's list, and each episode's position in
    the file, so that one is read without the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: dict[str, Any] = {}
        self._read_columns() if path.suffix == ".parquet" else self._scan_lines()

    def __len__(self) -> int:
        return len(self._columns["id"])

    def column(self, name: str) -> list[Any]:
        """A column, with one value per episode."""
        return _as_list(self._columns[name])

    def slice(self, first: int, count: int) -> dict[str, Any]:
        """The columns of `count` episodes from the `first` on."""
        return {name: _as_list(values[first : first + count]) for name, values in self._columns.items()}

    def record(self, index: int) -> dict[str, Any]:
        """An episode's full record (`envgym.episodes.record`)."""
        if not 0 <= index < len(self):
            raise DataError(f"{self.path} has {len(self)} episodes, none of number {index}")
        if self.path.suffix == ".parquet":
            row = self._row(index, self._file.read)
            return {**row, "task": json.loads(row["task"]), "metrics": dict(row["metrics"])}
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            record: dict[str, Any] = json.loads(file.readline(EPISODE))
        return record

    def beginnings(self, indices: Sequence[int]) -> list[list[str]]:
        """The `beginning` of each of these episodes. Of a Parquet file it reads only their messages and answers, not
        their tokens, and only the row groups that hold them."""
        if self.path.suffix != ".parquet":
            return [beginning(self.record(index)) for index in indices]
        read = lru_cache(1)(self._file.read)  # neighbors are in one row group
        rows = [self._row(index, read, ("messages", "task", "answer")) for index in indices]
        return [beginning({**row, "task": json.loads(row["task"])}) for row in rows]

    def misgraded(self) -> list[int]:
        """The indices of the episodes whose answer is what the task wanted, and whose score (without one, the reward)
        is below 1."""
        columns = zip(self.column("score"), self.column("reward"), self._answers(), strict=True)
        graded = ((reward if score is None else score, texts) for score, reward, texts in columns)
        return [
            index
            for index, (value, (reference, answer)) in enumerate(graded)
            if value is not None and value < 1 and answer and reference == answer
        ]

    def unstated(self) -> list[int]:
        """The indices of the episodes whose answer is in none of the policy's messages, letter for letter."""
        records = self._records(("messages", "answer"))
        return [index for index, record in enumerate(records) if _is_unstated(record)]

    def _answers(self) -> Iterator[list[str]]:
        """Of each episode what its task wanted, and what was read as the answer."""
        reference = lru_cache(CACHED)(lambda task: json.loads(task).get("answer"))  # members of a group share the task
        for record in self._records(("task", "answer")):
            task = record["task"]
            expected = reference(task) if isinstance(task, str) else task.get("answer")
            yield [_line_of(expected), _line_of(record["answer"])]

    def _records(self, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Of each episode these columns; of a file of lines all."""
        if self.path.suffix != ".parquet":
            yield from map(self.record, range(len(self)))
            return
        for number in range(len(self._starts)):
            table = self._file.read((number,), columns)
            if sum(map(unpacked_size, table.columns)) > GROUP:
                raise DataError(f"{self.path} has texts of more than {GROUP >> 20} MiB: they are not read")
            yield from table.to_pylist()

    def search(self, text: str) -> list[int]:
        """The indices of the episodes that contain a text, ignoring case."""
        records = self._records(("messages", "task"))
        needle = text.casefold()
        values = (leaves([record["messages"], _task_of(record)]) for record in records)
        texts = ("\n".join(str(value) for value in of_episode if value is not None) for of_episode in values)
        return [index for index, content in enumerate(texts) if needle in content.casefold()]

    # -- Parquet: columns, and groups of a few rows ------------------------------------------------------------

    def _read_columns(self) -> None:
        import pyarrow as pa

        self._file = file = Parquet(self.path)
        paths = {name: OUTCOME.get(name, name) for name in (*TEXTS, *NUMBERS)}
        table = file.read(range(file.metadata.num_row_groups), list(paths.values())).flatten()
        if sum(map(unpacked_size, table.columns)) > LISTED:
            raise DataError(f"{self.path} has lists of more than {LISTED >> 20} MiB: they are not shown")
        problem = f"{self.path} is not a file of episodes:"
        for name, column in paths.items():  # only these columns are listed
            if column not in table.column_names:
                raise DataError(f"{problem} it has no column {column!r}")
            values = table[column]
            is_whole = name in NUMBERS and pa.types.is_integer(values.type)
            try:
                self._columns[name] = values if is_whole else values.cast("string" if name in TEXTS else "float64")
            except pa.ArrowException:
                raise DataError(f"{problem} its column {column!r} has another type") from None
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        self._starts = array("q", itertools.accumulate(sizes, initial=0))[:-1]

    def _row(self, index: int, read: Callable[..., Any], columns: tuple[str, ...] | None = None) -> Any:
        number = bisect.bisect_right(self._starts, index) - 1
        row = read((number,), columns).take([index - self._starts[number]])
        if sum(map(unpacked_size, row.columns)) > ROW:
            raise DataError(f"{self.path}, episode {index}: it is larger than {ROW >> 20} MiB, and is not shown")
        return row.to_pylist()[0]

    # -- lines of JSON -----------------------------------------------------------------------------------------

    def _scan_lines(self) -> None:
        """A later line of an episode, after the judging of its group, replaces the earlier one (see `Journal`)."""
        columns: dict[str, list[Any]] = {name: [] for name in (*TEXTS, *NUMBERS)}
        starts, size = array("q"), 0
        positions: dict[tuple[Any, ...], int] = {}
        for start, _, line in complete_lines(self.path, EPISODE):
            try:
                record = json.loads(line)
                values = _row_columns(record)
                names = ("group", "member", "id", "key", "seconds")
                identity = (*(values[name] for name in names), hash(json.dumps(record["messages"])))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise DataError(f"{self.path}, byte {start}: this is not an episode") from None
            size += sum(map(sys.getsizeof, values.values()))
            if size > LISTED:
                raise DataError(f"{self.path} has lists of more than {LISTED >> 20} MiB: they are not shown")
            position = positions.setdefault(identity, len(starts))
            starts[position : position + 1] = array("q", [start])
            for name, column in columns.items():
                column[position : position + 1] = [values[name]]
        self._starts, self._columns = starts, dict(columns)


def _task_of(record: Mapping[str, Any]) -> Any:
    return json.loads(record["task"]) if isinstance(record["task"], str) else record["task"]


def beginning(record: Mapping[str, Any]) -> list[str]:
    """The beginnings of an episode's prompt and of its last answer, what its task wanted and what was read as the
    answer, each as one line, and `UNSTATED` if the policy did not write that; empty for what it does not have."""
    texts = excerpt((message["role"], str(message["content"] or "")) for message in record["messages"])
    return [*map(_line_of, texts), _line_of(record["task"].get("answer")), _line_of(record["answer"]),
            UNSTATED if _is_unstated(record) else ""]  # fmt: skip


def _is_unstated(record: Mapping[str, Any]) -> bool:
    answer = _line_of(record["answer"])
    messages = (message for message in record["messages"] if message["role"] == "assistant")
    text = " ".join(f"{message['content']} {message.get('tool_calls')}" for message in messages)
    return bool(answer) and answer not in " ".join(text.split())


def _line_of(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(text[:800].split())[:200]


def _as_list(values: Any) -> list[Any]:
    items: list[Any] = values if isinstance(values, list) else values.to_pylist()
    return items


def _row_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a record."""
    segments = [segment for row in record["rows"] for segment in row["segments"] if segment["role"] == "action"]
    sampled = [value for segment in segments for value in segment["logprobs"] or ()]
    task = record["task"]
    row = {
        **{name: record.get(name) for name in (*TEXTS, *NUMBERS)},
        "key": f"{task['env']}/{task['id']}" if task["env"] else task["id"],
        "tokens": sum(len(segment["token_ids"]) for segment in segments),
        "turns": sum(len(row["turns"]) for row in record["rows"]),
        "surprise": -sum(sampled) / len(sampled) if sampled else None,
        "status": record["outcome"]["status"],
        "reason": record["outcome"]["reason"],
    }
    for names, kinds in ((TEXTS, str), (NUMBERS, int | float)):
        if not all(isinstance(row[name], kinds | None) for name in names):
            raise TypeError("a text or a number is something else")
    return row


@lru_cache(CACHED)
def _listing(path: Path, mtime_ns: int, size: int) -> Listing:
    return Listing(path)


def listing(source: Source, step: int) -> Listing:
    """The list of a step's file. Raises `DataError` if there is none, or it cannot be read."""
    if step not in (files := source.files()):
        raise DataError(f"{source.id} has no episodes of step {step}")
    path = regular(files[step], source.roots)
    status = path.stat()
    return _listing(path, status.st_mtime_ns, status.st_size)


def episode_with_tokens(source: Source, step: int, index: int) -> dict[str, Any]:
    """An episode's record; its rows have the tokens by column, and what the learner computed for them. Added are
    `siblings`, the indices of its group's episodes, and its line in the list (`listed`, `beginning`)."""
    episodes = listing(source, step)
    record = episodes.record(index)
    group = [n for n, name in enumerate(episodes.column("group")) if name == record["group"]]
    learned = _training_columns(source, step, record["id"])
    rows = [_tokens(row, source.tokenizer(), learned.get(number)) for number, row in enumerate(record["rows"])]
    line = {"listed": episodes.slice(index, 1), "beginning": beginning(record)}
    messages = [{**message, "parts": _parts(message.get("parts"))} for message in record["messages"]]
    return {**record, **line, "messages": messages, "rows": rows, "siblings": group, "index": index, "step": step}


def _parts(value: Any) -> list[Mapping[str, Any]]:
    """The parts of a message with images, which a Parquet file has as JSON. Empty for other messages."""
    parts = json.loads(value) if isinstance(value, str) else value or []
    return [part for part in parts if isinstance(part, Mapping)]


def _texts(file: Path | None, token_ids: Sequence[int]) -> list[str] | None:
    """Texts of single tokens, from a tokenizer's file."""
    try:
        text_of = None if file is None else _decoder(file)
        return None if text_of is None else [text_of(token) for token in token_ids]
    except (TypeError, OverflowError):  # not token ids
        return None


@lru_cache(CACHED)
def _decoder(file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        check_tokenizer(file)
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises no narrower class; a damaged file gives no texts
        return None
    return lru_cache(TOKENS)(lambda token: tokenizer.decode([token], skip_special_tokens=False)[:LONGEST])


def _tokens(row: Mapping[str, Any], tokenizer: Path | None, learned: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row's tokens by column; None stands for an unknown value. `images` are those with their tokens in it."""
    tokens: dict[str, list[Any]] = {name: [] for name in ("ids", "roles", "weights", "logprobs", "versions")}
    images: list[dict[str, Any]] = []
    for segment in row["segments"]:
        ids, first = segment["token_ids"], len(tokens["ids"])
        for image in segment.get("images") or ():
            if 0 <= image["start"] < image["start"] + image["length"] <= len(ids):
                images.append({**image, "start": first + image["start"]})
        tokens["ids"] += ids
        tokens["roles"] += [segment["role"]] * len(ids)
        tokens["weights"] += segment.get("weights") or [1.0 if segment["role"] == "action" else 0.0] * len(ids)
        tokens["logprobs"] += segment.get("logprobs") or [None] * len(ids)
        versions: list[Any] = [None] * len(ids)
        for span in segment.get("versions") or ():
            start, end = (min(max(0, span[edge]), len(ids)) for edge in ("start", "end"))
            versions[start:end] = [span["version"]] * (end - start)
        tokens["versions"] += versions
    sampled = [value is not None for value in tokens["logprobs"]]
    sources = {"advantages": "advantages", "trained": "logprobs", "ratios": "ratios", "entropies": "entropies"}
    learning = {
        name: [value if is_sampled else None for value, is_sampled in zip(learned[column], sampled, strict=False)]
        for name, column in sources.items() if learned.get(column) is not None
    } if learned else {}  # fmt: skip
    texts = _texts(tokenizer, tokens["ids"])
    columns = {**tokens, **learning, "images": images, "texts": texts}
    return {**columns, "turns": row["turns"], "objective": row["objective"]}


def _training_columns(source: Source, step: int, episode: str) -> dict[int, dict[str, Any]]:
    """The advantages, log-probabilities and ratios of an episode's rows, by row number. It reads only row groups that
    may hold the episode."""
    if (path := source.step_file("learned", step)) is None:
        return {}
    import pyarrow.compute as pc

    file, rows = Parquet(path), []
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(0).statistics  # of the column `episode`
        if statistics is None or not statistics.has_min_max or statistics.min <= episode <= statistics.max:
            table = file.read([number])
            table = table.filter(pc.equal(table["episode"].cast("string"), episode))
            if sum(map(unpacked_size, table.columns)) > ROW:
                raise DataError(f"{path} holds more than {ROW >> 20} MiB of an episode: it is not shown")
            rows += table.to_pylist()
    return {row["row"]: row for row in rows}


def lanes(source: Source, step: int) -> dict[str, Any]:
    """The recorded times of a step: its phases, and its episodes' spans."""
    events: dict[str, list[Any]] = {"phases": [], "episodes": []}
    if (path := source.step_file("events", step)) is None:
        return events
    for _, _, line in complete_lines(path, RECORD):
        event = json_object(line) or {}  # empty for a line truncated by a kill
        if isinstance(event.get("phases"), list):
            events["phases"] += event["phases"]
        if isinstance(event.get("episode"), str) and isinstance(event.get("spans"), list):
            events["episodes"].append(event)
    return events


def compare_episodes(a: Listing, b: Listing) -> list[dict[str, Any]]:
    """Compare B with A, task by task, by their scores, or by their rewards if neither has scores. Evaluations in a run
    are compared pass by pass, as sampled and greedy episodes have means of their own; anything else has one
    comparison, of the pass "". Each has the paired difference, and of each task both means and the indices of its
    episodes; the task with the largest difference comes first."""
    field = "score" if any(value is not None for value in (*a.column("score"), *b.column("score"))) else "reward"
    sides = [_values_by_task(side, field) for side in (a, b)]
    comparisons = []
    for part in PASSES:
        prefix = f"{part}: "
        pair = [{k.removeprefix(prefix): v for k, v in side.items() if k.startswith(prefix)} for side in sides]
        if all(pair):
            comparisons.append({"pass": part, "of": field, **_comparison(*pair)})
    return comparisons or [{"pass": "", "of": field, **_comparison(*sides)}]


def _comparison(a: Mapping[str, _Values], b: Mapping[str, _Values]) -> dict[str, Any]:
    from envgym.evaluation.paired import paired_difference

    scores = [{key: [value for _, value in values] for key, values in side.items()} for side in (a, b)]
    problems = {key: key.rpartition(": ")[2] for side in scores for key in side}  # alike in all parts of an evaluation
    paired = paired_difference(scores[0], scores[1], clusters=problems).as_dict()
    tasks: list[dict[str, Any]] = []
    for key in a.keys() & b.keys():
        means = [sum(side[key]) / len(side[key]) for side in scores]
        episodes = [[n for n, _ in values] for values in (a[key], b[key])]
        tasks.append({"key": key, "a": means[0], "b": means[1], "episodes": episodes})
    tasks.sort(key=lambda task: (-abs(task["b"] - task["a"]), task["key"]))
    return {**paired, "tasks": tasks}


def _task_names(side: Listing) -> list[str]:
    """The name of each episode's task, with its part of an evaluation before it."""
    parts = zip((group.rpartition("/")[0] for group in side.column("group")), side.column("key"), strict=True)
    return [key if part.startswith(("step-", "rollout-")) or not part else f"{part}: {key}" for part, key in parts]


def _values_by_task(side: Listing, field: str) -> dict[str, _Values]:
    values: dict[str, _Values] = {}
    for index, (name, value) in enumerate(zip(_task_names(side), side.column(field), strict=True)):
        if value is not None:
            values.setdefault(name, []).append((index, float(value)))
    return values


def task_history(source: Source, step: int, index: int) -> list[dict[str, Any]]:
    """The episodes of the same task at all steps of a source, by step, of each pass of an evaluation: the `index` of
    each in its file, its group, reward, score and status, and its `beginning`."""
    key = listing(source, step).column("key")[index]
    lines = []
    for number in sorted(source.files()):
        side, by_pass = listing(source, number), dict[str, list[int]]()
        for position, (group, task) in enumerate(zip(side.column("group"), side.column("key"), strict=True)):
            if task == key:
                by_pass.setdefault(group.rpartition("/")[0], []).append(position)
        indices = [position for positions in by_pass.values() for position in positions[:HISTORY]]
        for position, texts in zip(indices, side.beginnings(indices), strict=True):
            columns = side.slice(position, 1)
            line = {column: columns[column][0] for column in ("group", "reward", "score", "status")}
            lines.append({"step": number, "index": position, "beginning": texts, **line})
    return lines
