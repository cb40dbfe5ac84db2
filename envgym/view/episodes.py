"""Episodes as the page shows them: lists of all in a file, and one with its tokens, read without the others."""

from __future__ import annotations

import bisect
import itertools
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from envgym.errors import DataError

from .reading import EPISODE, LISTED, RECORD, ROW, Parquet, json_object, regular, whole_lines, written_out
from .sources import Source

TEXTS = ("id", "key", "group", "env", "status", "reason")
NUMBERS = ("member", "attempt", "reward", "score", "seconds", "tokens", "turns", "surprise")
"""Columns of a list of episodes."""
OUTCOME = {"status": "outcome.status", "reason": "outcome.reason"}
"""Those that lie within another in a Parquet file."""
CACHED = 4
"""Files whose lists are kept in memory."""
TOKENS = 65536
"""Texts of tokens that are kept."""


class Listing:
    """The episodes of a file: what a list shows of each, by column, and where each lies in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: dict[str, Any] = {}
        self._read_columns() if path.suffix == ".parquet" else self._scan_lines()

    def __len__(self) -> int:
        return len(self._columns["id"])

    def column(self, name: str) -> list[Any]:
        """A column: one value of all episodes."""
        return _as_list(self._columns[name])

    def slice(self, first: int, count: int) -> dict[str, Any]:
        """The columns of `count` episodes from the `first` on."""
        return {name: _as_list(values[first : first + count]) for name, values in self._columns.items()}

    def record(self, index: int) -> dict[str, Any]:
        """An episode's whole record (`envgym.episodes.record`)."""
        if not 0 <= index < len(self):
            raise DataError(f"{self.path} has {len(self)} episodes, none of number {index}")
        if self.path.suffix == ".parquet":
            return self._row(index)
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            record: dict[str, Any] = json.loads(file.readline(EPISODE))
        return record

    def holds(self, text: str) -> list[int]:
        """The numbers of the episodes in which a text stands, in whatever case."""
        wanted, found = text.casefold(), []
        for index in range(len(self)):
            record = self.record(index)
            if wanted in json.dumps([record["messages"], record["task"]], ensure_ascii=False).casefold():
                found.append(index)
        return found

    # -- Parquet: columns, and groups of a few rows ------------------------------------------------------------

    def _read_columns(self) -> None:
        import pyarrow as pa

        self._file = file = Parquet(self.path)
        paths = {name: OUTCOME.get(name, name) for name in (*TEXTS, *NUMBERS)}
        table = file.read(range(file.metadata.num_row_groups), list(paths.values())).flatten()
        if sum(map(written_out, table.columns)) > LISTED:
            raise DataError(f"{self.path} has lists of more than {LISTED >> 20} MiB: they are not shown")
        for name, column in paths.items():  # lists only of what is asked for
            if column not in table.column_names:
                raise DataError(f"{self.path} is no file of episodes: it has no column {column!r}")
            values = table[column]
            is_whole = name in NUMBERS and pa.types.is_integer(values.type)
            try:
                self._columns[name] = values if is_whole else values.cast("string" if name in TEXTS else "float64")
            except pa.ArrowException:
                raise DataError(f"{self.path} is no file of episodes: its column {column!r} is another's") from None
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        self._starts = array("q", itertools.accumulate(sizes, initial=0))[:-1]

    def _row(self, index: int) -> dict[str, Any]:
        number = bisect.bisect_right(self._starts, index) - 1
        row = self._file.read([number]).take([index - self._starts[number]])
        if sum(map(written_out, row.columns)) > ROW:
            raise DataError(f"{self.path}, episode {index}: it is larger than {ROW >> 20} MiB, and is not shown")
        [record] = row.to_pylist()
        return {**record, "task": json.loads(record["task"]), "metrics": dict(record["metrics"])}

    # -- lines of JSON -----------------------------------------------------------------------------------------

    def _scan_lines(self) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in (*TEXTS, *NUMBERS)}
        starts, size = array("q"), 0
        for start, _, line in whole_lines(self.path, EPISODE):
            try:
                listed = _listed(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise DataError(f"{self.path}, byte {start}: this is not an episode") from None
            size += sum(map(sys.getsizeof, listed.values()))
            if size > LISTED:
                raise DataError(f"{self.path} has lists of more than {LISTED >> 20} MiB: they are not shown")
            starts.append(start)
            for name, column in columns.items():
                column.append(listed[name])
        self._starts, self._columns = starts, dict(columns)


def _as_list(values: Any) -> list[Any]:
    found: list[Any] = values if isinstance(values, list) else values.to_pylist()
    return found


def _listed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a record."""
    segments = [segment for row in record["rows"] for segment in row["segments"] if segment["role"] == "action"]
    sampled = [value for segment in segments for value in segment["logprobs"] or ()]
    task = record["task"]
    listed = {
        **{name: record.get(name) for name in (*TEXTS, *NUMBERS)},
        "key": f"{task['env']}/{task['id']}" if task["env"] else task["id"],
        "tokens": sum(len(segment["token_ids"]) for segment in segments),
        "turns": sum(len(row["turns"]) for row in record["rows"]),
        "surprise": -sum(sampled) / len(sampled) if sampled else None,
        "status": record["outcome"]["status"],
        "reason": record["outcome"]["reason"],
    }
    for names, kinds in ((TEXTS, str), (NUMBERS, int | float)):
        if not all(isinstance(listed[name], kinds | None) for name in names):
            raise TypeError("a text or a number is something else")
    return listed


@lru_cache(CACHED)
def _listing(path: Path, changed: int, size: int) -> Listing:
    return Listing(path)


def listing(source: Source, step: int) -> Listing:
    """The list of a step's file. Raises `DataError` where there is none, or it cannot be read."""
    if step not in (files := source.files()):
        raise DataError(f"{source.id} has no episodes of step {step}")
    path = regular(files[step], source.roots)
    status = path.stat()
    return _listing(path, status.st_mtime_ns, status.st_size)


def shown(source: Source, step: int, index: int) -> dict[str, Any]:
    """An episode with its tokens, `siblings` (numbers of its group's episodes) and what was learned of it."""
    found = listing(source, step)
    record = found.record(index)
    group = [n for n, name in enumerate(found.column("group")) if name == record["group"]]
    learned = _learned(source, step, record["id"])
    rows = [_tokens(row, source.tokenizer(), learned.get(number)) for number, row in enumerate(record["rows"])]
    return {**record, "rows": rows, "siblings": group, "index": index, "step": step, "listed": found.slice(index, 1)}


def _texts(file: Path | None, token_ids: Sequence[int]) -> list[str] | None:
    """Texts of single tokens, by a tokenizer's file."""
    try:
        text_of = None if file is None else _decoder(file)
        return None if text_of is None else [text_of(token) for token in token_ids]
    except (TypeError, OverflowError):  # these are no tokens
        return None


@lru_cache(CACHED)
def _decoder(file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # it raises nothing narrower: a damaged one gives no texts
        return None
    return lru_cache(TOKENS)(lambda token: tokenizer.decode([token], skip_special_tokens=False))


def _tokens(row: Mapping[str, Any], tokenizer: Path | None, learned: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row's tokens by column; None stands for what is not known of a token."""
    tokens: dict[str, list[Any]] = {name: [] for name in ("ids", "roles", "weights", "logprobs", "versions")}
    for segment in row["segments"]:
        ids = segment["token_ids"]
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
    made = {"advantages": "advantages", "trained": "logprobs", "ratios": "ratios"}
    learning = {
        name: [value if known else None for value, known in zip(learned[column], sampled, strict=False)]
        for name, column in made.items()
    } if learned else {}  # fmt: skip
    texts = _texts(tokenizer, tokens["ids"])
    return {**tokens, **learning, "texts": texts, "turns": row["turns"], "objective": row["objective"]}


def _learned(source: Source, step: int, episode: str) -> dict[int, dict[str, Any]]:
    """Advantages, log-probabilities and ratios of an episode's rows, by row number, read without those of others."""
    if (path := source.of_step("learned", step)) is None:
        return {}
    import pyarrow.compute as pc

    file, rows = Parquet(path), []
    for number in range(file.metadata.num_row_groups):
        known = file.metadata.row_group(number).column(0).statistics  # of the column `episode`
        if known is None or not known.has_min_max or known.min <= episode <= known.max:
            table = file.read([number])
            table = table.filter(pc.equal(table["episode"].cast("string"), episode))
            if sum(map(written_out, table.columns)) > ROW:
                raise DataError(f"{path} holds more than {ROW >> 20} MiB of an episode: it is not shown")
            rows += table.to_pylist()
    return {row["row"]: row for row in rows}


def lanes(source: Source, step: int) -> dict[str, Any]:
    """The recorded times of a step: its phases, and its episodes' spans."""
    found: dict[str, list[Any]] = {"phases": [], "episodes": []}
    if (path := source.of_step("events", step)) is None:
        return found
    for _, _, line in whole_lines(path, RECORD):
        event = json_object(line)  # empty for the line that a kill has cut
        if isinstance(event.get("phases"), list):
            found["phases"] += event["phases"]
        if isinstance(event.get("episode"), str) and isinstance(event.get("spans"), list):
            found["episodes"].append(event)
    return found


def compared(a: Listing, b: Listing) -> dict[str, Any]:
    """B against A by task: the paired difference of their scores (rewards, where neither has a score), and each task's
    means with the episodes they are of, those that differ most first."""
    from envgym.evaluation.paired import paired_difference

    of = "score" if any(value is not None for value in (*a.column("score"), *b.column("score"))) else "reward"
    sides = [_by_task(side, of) for side in (a, b)]
    scores = [{key: [value for _, value in own] for key, own in side.items()} for side in sides]
    problems = {key: key.rpartition(": ")[2] for side in scores for key in side}  # greedy or not, it is the same one
    paired = paired_difference(scores[0], scores[1], clusters=problems).as_dict()
    tasks: list[dict[str, Any]] = []
    for key in sides[0].keys() & sides[1].keys():
        means = [sum(side[key]) / len(side[key]) for side in scores]
        tasks.append(
            {"key": key, "a": means[0], "b": means[1], "episodes": [[n for n, _ in own[key]] for own in sides]}
        )
    tasks.sort(key=lambda task: (-abs(task["b"] - task["a"]), task["key"]))
    return {**paired, "of": of, "tasks": tasks}


def _by_task(side: Listing, of: str) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    columns = zip(side.column("group"), side.column("key"), side.column(of), strict=True)
    for index, (group, key, value) in enumerate(columns):
        part = group.rpartition("/")[0]  # of an evaluation: what is greedy is compared with what is
        name = key if part.startswith(("step-", "rollout-")) or not part else f"{part}: {key}"
        if value is not None:
            found.setdefault(name, []).append((index, float(value)))
    return found
