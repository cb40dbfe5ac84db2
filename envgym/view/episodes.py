"""Episodes as the page shows them: lists of all in a file, and one with its tokens, read without the others."""

from __future__ import annotations

import bisect
import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from envgym.errors import DataError

from .sources import Source

PLAIN = ("id", "key", "group", "member", "env", "attempt", "reward", "score", "seconds", "tokens", "turns", "surprise")
"""Columns of a list of episodes, beside `status` and `reason`."""
CACHED = 4
"""Files whose lists are kept in memory."""
TEXTS = 65536
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
            record: dict[str, Any] = json.loads(file.readline())
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
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(self.path)
            table = file.read(columns=[*PLAIN, "outcome.status", "outcome.reason"])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} is no file of episodes ({str(error).splitlines()[0]})") from None
        if missing := [name for name in PLAIN if name not in table.column_names]:
            raise DataError(f"{self.path} is no file of episodes: it has no column {missing[0]!r}")
        self._metadata = file.metadata  # some kilobytes a group, which need not be read with every episode
        outcome = table["outcome"].combine_chunks()
        self._columns = {name: table[name] for name in PLAIN}  # lists only of what is asked for
        self._columns |= {name: outcome.field(name) for name in ("status", "reason")}
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        self._starts = array("q", itertools.accumulate(sizes, initial=0))[:-1]

    def _row(self, index: int) -> dict[str, Any]:
        import pyarrow.parquet as pq

        number = bisect.bisect_right(self._starts, index) - 1
        group = pq.ParquetFile(self.path, metadata=self._metadata).read_row_group(number)
        [row] = group.slice(index - self._starts[number], 1).to_pylist()
        return {**row, "task": json.loads(row["task"]), "metrics": dict(row["metrics"])}

    # -- lines of JSON -----------------------------------------------------------------------------------------

    def _scan_lines(self) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in (*PLAIN, "status", "reason")}
        starts, at = array("q"), 0
        with self.path.open("rb") as file:
            for line in file:
                start, at = at, at + len(line)
                try:
                    listed = _listed(json.loads(line)) if line.endswith(b"\n") else None  # else it is being written
                except (ValueError, KeyError, TypeError):
                    raise DataError(f"{self.path}, byte {start}: this is not an episode") from None
                if listed is not None:
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
    return {
        **{name: record.get(name) for name in PLAIN},
        "key": f"{task['env']}/{task['id']}" if task["env"] else task["id"],
        "tokens": sum(len(segment["token_ids"]) for segment in segments),
        "turns": sum(len(row["turns"]) for row in record["rows"]),
        "surprise": -sum(sampled) / len(sampled) if sampled else None,
        "status": record["outcome"]["status"],
        "reason": record["outcome"]["reason"],
    }


@lru_cache(CACHED)
def _listing(path: Path, changed: int, size: int) -> Listing:
    return Listing(path)


def listing(source: Source, step: int) -> Listing:
    """The list of a step's file. Raises `DataError` where there is none, or it cannot be read."""
    path = source.files().get(step)
    if path is None or not path.is_file():
        raise DataError(f"{source.id} has no episodes of step {step}")
    status = path.stat()
    return _listing(path, status.st_mtime_ns, status.st_size)


def shown(source: Source, step: int, index: int) -> dict[str, Any]:
    """An episode with its tokens, `siblings` (numbers of its group's episodes) and what was learned of it."""
    found = listing(source, step)
    record = found.record(index)
    group = [n for n, name in enumerate(found.column("group")) if name == record["group"]]
    texts = Texts(source.tokenizer())
    learned = _learned(source, step, record["id"])
    rows = [_tokens(row, texts, learned.get(number)) for number, row in enumerate(record["rows"])]
    return {**record, "rows": rows, "siblings": group, "index": index, "step": step, "listed": found.slice(index, 1)}


class Texts:
    """Texts of single tokens, by a tokenizer's file."""

    def __init__(self, file: Path | None) -> None:
        self._of = None if file is None else _texts(file)

    def __call__(self, token_ids: Sequence[int]) -> list[str] | None:
        return None if self._of is None else [self._of(token) for token in token_ids]


@lru_cache(CACHED)
def _texts(file: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lru_cache(TEXTS)(lambda token: tokenizer.decode([token], skip_special_tokens=False))


def _tokens(row: Mapping[str, Any], texts: Texts, learned: Mapping[str, Any] | None) -> dict[str, Any]:
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
            versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
        tokens["versions"] += versions
    sampled = [value is not None for value in tokens["logprobs"]]
    made = {"advantages": "advantages", "trained": "logprobs", "ratios": "ratios"}
    learning = {
        name: [value if known else None for value, known in zip(learned[column], sampled, strict=False)]
        for name, column in made.items()
    } if learned else {}  # fmt: skip
    return {**tokens, **learning, "texts": texts(tokens["ids"]), "turns": row["turns"], "objective": row["objective"]}


def _learned(source: Source, step: int, episode: str) -> dict[int, dict[str, Any]]:
    """Advantages, log-probabilities and ratios of an episode's rows, by row number, read without those of others."""
    path = source.of_step("learned", step)
    if source.kind != "run" or not path.is_file():
        return {}
    import pyarrow.parquet as pq

    rows = pq.read_table(path, filters=[("episode", "==", episode)]).to_pylist()
    return {row["row"]: row for row in rows}


def lanes(source: Source, step: int) -> dict[str, Any]:
    """The recorded times of a step: its phases, and its episodes' spans."""
    path = source.of_step("events", step)
    found: dict[str, list[Any]] = {"phases": [], "episodes": []}
    if source.kind != "run" or not path.is_file():
        return found
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:  # the line that a kill has cut
                continue
            found["phases"] += event.get("phases", [])
            found["episodes"] += [event] if "episode" in event else []
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
