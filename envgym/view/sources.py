"""Sources of the page: runs, evaluations and files of episodes, and what their folders say of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.disk import holder
from envgym.errors import ConfigError, DataError
from envgym.monitoring.alarms import sentence
from envgym.run_folder import files_by_step
from envgym.yaml_files import read_yaml

from . import reading
from .reading import json_object, leads_out, regular, whole_lines, within

CURVE = ("eval/score", "score/mean", "reward/mean", "loss")
"""Metrics of which a run's small picture shows the first that it has."""
FILES = (".jsonl", ".parquet")
SHOWN = 48
"""Points of that picture."""
WALKED = 20_000
"""Files and folders that are looked at in a folder, and in all below each of its folders, for runs."""
DEPTH = 8
"""Folders below a given one in which runs are looked for."""


@dataclass(frozen=True, slots=True)
class Source:
    """A stage of a run, an evaluation, or a file of episodes. `id` is its path as it was given, and its name. Nothing
    is read but regular files that lie within the `roots`. One of kind `link`, which leads out of them, or `unreadable`
    is only listed; `why` is a sentence about it."""

    id: str
    kind: str
    path: Path
    roots: tuple[Path, ...]
    why: str = ""

    def file(self, name: str, most: int) -> Path | None:
        """A file of its folder; None where there is none. Raises `DataError` for one that is not read."""
        path = self.path / name
        return regular(path, self.roots, most) if self.kind != "file" and os.path.lexists(path) else None

    def files(self) -> dict[int, Path]:
        """Files of episodes by step; those that have no steps are of step 0."""
        if self.kind == "file":
            return {0: self.path}
        if self.kind == "evaluation":
            return {0: self.path / "episodes.jsonl"}
        alone, folder = self.path / "episodes.parquet", self.path / "rollouts"
        if not within(folder, self.roots):
            raise DataError(leads_out(folder))
        return files_by_step(folder, ".parquet") or ({0: alone} if alone.is_file() else {})

    def of_step(self, folder: str, step: int) -> Path | None:
        """The file that one of the folders beside the rollouts has of a step, where there is one."""
        is_events = folder == "events"
        return self.file(
            f"{folder}/step_{step:06d}{'.jsonl' if is_events else '.parquet'}",
            reading.EVENTS if is_events else reading.GROUP,
        )

    def summary(self) -> dict[str, Any]:
        """`summary.json` of a run, `result.json` of an evaluation; empty where it has not ended."""
        file = self.file("result.json" if self.kind == "evaluation" else "summary.json", reading.SUMMARY)
        return {} if file is None else json_object(file.read_bytes())

    def config(self) -> dict[str, Any]:
        """Its settings; empty for a file."""
        for folder in (self.path, self.path.parent):  # of a stage, they lie above it
            file = folder / "config.yaml"
            if self.kind != "file" and os.path.lexists(file) and (folder == self.path or within(file, self.roots)):
                found: dict[str, Any] = read_yaml(regular(file, self.roots))
                return found
        return {}

    def tokenizer(self) -> Path | None:
        """The file of the tokenizer that its tokens are of, where it holds one. A run from before runs kept theirs from
        the start has it beside its model."""
        return self.file("tokenizer.json", reading.TOKENIZER) or self.file("model/tokenizer.json", reading.TOKENIZER)

    def records(self, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records of `metrics.jsonl` from a byte on, each with the byte after it. Lines that are none are left out,
        as the middle of one is where the file was rewound; so is what is neither a number nor a list."""
        if self.kind == "run" and (path := self.file("metrics.jsonl", reading.METRICS)) is not None:
            for _, end, line in whole_lines(path, reading.RECORD, offset):
                record = json_object(line)
                if isinstance(record.get("step"), int):
                    yield end, {name: value for name, value in record.items() if _is_plain(value)}

    def metrics(self, offset: int) -> dict[str, Any]:
        """The records from a byte on, the byte after the last of them, and the run's state."""
        found = list(self.records(offset))
        end = found[-1][0] if found else offset
        return {"records": [record for _, record in found], "offset": end, "state": self.state(self.summary())}

    def alarms(self) -> list[dict[str, Any]]:
        """The sentences of the alarms that the run raised, by step."""
        named = ((record, name) for _, record in self.records() for name in _listed(record, "alarms"))
        return [{"step": record["step"], "text": text} for record, name in named if (text := sentence(name, record))]

    def listed(self) -> dict[str, Any]:
        """Its line in the list of all."""
        summary, files = self.summary(), self.files()
        last = [files[max(files)]] if files else []
        newest = max((path.stat().st_mtime for path in (self.path, *last) if path.exists()), default=0.0)
        line = {"id": self.id, "kind": self.kind, "changed": newest, "files": len(files), "state": self.state(summary)}
        if self.kind == "run":
            curves: dict[str, list[Any]] = {key: [] for key in CURVE}
            step = alarms = 0
            for _, record in self.records():
                step, alarms = record["step"], alarms + len(_listed(record, "alarms"))
                for key in curves.keys() & record.keys():
                    curves[key].append(record[key])
            shown = next((key for key in CURVE if curves[key]), None)
            evals = summary.get("eval") or {}
            line |= {"steps": step, "curve": curves[shown][-SHOWN:] if shown else [], "of": shown, "alarms": alarms}
            line |= {when: (evals.get(when) or {}).get("score") for when in ("before", "after")}
        elif self.kind == "evaluation":
            line["after"] = summary.get("score")
        return line

    def state(self, summary: dict[str, Any]) -> str:
        if self.kind == "file":
            return "file"
        if holder(self.path) is not None or holder(self.path.parent) is not None:
            return "running"
        return str(summary.get("status", "completed")) if summary else "unfinished"


def find(given: Sequence[Path]) -> dict[str, Source]:
    """Sources at the given paths, by id. Raises `ConfigError` for one at which there is nothing."""
    for path in given:
        if not path.exists():
            raise ConfigError(f"there is nothing at {path}: name a run, an evaluation, a file of episodes, or a folder")
        if path.is_file() and path.suffix not in FILES:
            raise ConfigError(f"{path} is no file of episodes: those end in {' or '.join(FILES)}")
    roots = tuple(Path(os.path.realpath(path)) for path in given)
    return {source.id: source for path in given for source in _walk(path, str(path), roots, iter(range(WALKED)))}


def _walk(path: Path, name: str, roots: tuple[Path, ...], places: Iterator[int], depth: int = 0) -> Iterator[Source]:
    """The sources at `path`, which is called `name`, and below it. Links are followed to what lies within the `roots`,
    but walked through they are not: they may lead back. Each file and folder takes one of the `places`."""
    text = name.encode(errors="replace").decode()
    try:
        is_link = depth > 0 and path.is_symlink()
        if is_link and not within(path, roots):
            yield Source(text, "link", path, roots, leads_out(path))
        elif (kind := _kind(path)) is not None:
            if text != name or "|" in name:
                raise DataError("its name holds '|' or what is no text: rename it to look at it")
            yield Source(name, kind, path, roots)
        elif path.is_dir() and not is_link and depth < DEPTH:  # of several, or a run of several stages
            for inner in _entries(path, places):
                below = places if depth else iter(range(WALKED))
                yield from _walk(inner, f"{name}/{inner.name}", roots, below, depth + 1)
    except (OSError, DataError) as error:
        yield Source(text, "unreadable", path, roots, str(error))


def _entries(folder: Path, places: Iterator[int]) -> list[Path]:
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if next(places, None) is None:
                raise DataError(f"{folder}: there are more than {WALKED:,} files and folders here: name one of them")
            names.append(entry.name)
    known = [folder / name for name in sorted(names) if name not in ("model", "checkpoints", "logs") and name[0] != "."]
    is_run = (folder / "config.yaml").exists()
    return [path for path in known if not (is_run and path.is_file())]


def _kind(path: Path) -> str | None:
    """The kind of source that a path is; None for another folder or file."""
    if path.is_file():
        return "file" if path.suffix in FILES else None
    if (path / "metrics.jsonl").is_file() or (path / "rollouts").is_dir() or (path / "episodes.parquet").is_file():
        return "run"
    return "evaluation" if any((path / name).is_file() for name in ("result.json", "episodes.jsonl")) else None


def _listed(record: dict[str, Any], key: str) -> list[Any]:
    return record[key] if isinstance(record.get(key), list) else []


def _is_plain(value: Any) -> bool:
    """True for a number, and for a list of numbers and texts."""
    if isinstance(value, list):
        return all(isinstance(one, int | float | str) for one in value)
    return isinstance(value, int | float)
