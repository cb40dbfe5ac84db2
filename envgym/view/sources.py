"""Sources of the page: runs, evaluations and files of episodes, and what their folders say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.config.recipes import read_yaml
from envgym.disk import holder
from envgym.errors import ConfigError
from envgym.monitoring.alarms import Alarms

CURVE = ("eval/score", "score/mean", "reward/mean", "loss")
"""Metrics of which a run's small picture shows the first that it has."""
FILES = (".jsonl", ".parquet")
SHOWN = 48
"""Points of that picture."""


@dataclass(frozen=True, slots=True)
class Source:
    """A stage of a run, an evaluation, or a file of episodes. `id` is its path as it was given, and its name."""

    id: str
    kind: str
    path: Path

    def files(self) -> dict[int, Path]:
        """Files of episodes by step; those that have no steps are of step 0."""
        if self.kind == "file":
            return {0: self.path}
        if self.kind == "evaluation":
            return {0: self.path / "episodes.jsonl"}
        found = {step_of(path): path for path in self.path.glob("rollouts/step_*.parquet")}
        alone = self.path / "episodes.parquet"
        return found or ({0: alone} if alone.is_file() else {})

    def of_step(self, folder: str, step: int) -> Path:
        """The file that one of the folders beside the rollouts has of a step."""
        return self.path / folder / f"step_{step:06d}{'.jsonl' if folder == 'events' else '.parquet'}"

    def summary(self) -> dict[str, Any]:
        """`summary.json` of a run, `result.json` of an evaluation; empty where it has not ended."""
        name = "result.json" if self.kind == "evaluation" else "summary.json"
        return read_json(self.path / name) if self.kind != "file" else {}

    def config(self) -> dict[str, Any]:
        """Its settings; empty for a file."""
        for folder in (self.path, self.path.parent):
            if self.kind != "file" and (folder / "config.yaml").is_file():
                found: dict[str, Any] = read_yaml(folder / "config.yaml")
                return found
        return {}

    def tokenizer(self) -> Path | None:
        """The file of the tokenizer that its tokens are of, where there is one on this machine."""
        stages = self.config().get("stages") or [{}]
        folders = [
            self.path / "model",
            *sorted(self.path.glob("checkpoints/*/model")),
            Path(str(stages[-1].get("model"))),
        ]
        files = [Path(folder, "tokenizer.json") for folder in folders]
        return next((file for file in files if file.is_file()), None)

    def metrics(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The records of `metrics.jsonl` from a byte on, and the byte after the last whole line."""
        path = self.path / "metrics.jsonl"
        if self.kind != "run" or not path.is_file() or path.stat().st_size <= offset:
            return [], offset
        with path.open("rb") as file:
            file.seek(offset)
            whole, _, _ = file.read().rpartition(b"\n")
        records = []
        for line in whole.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:  # the middle of a line: the file was rewound
                continue
        return records, offset + len(whole) + 1 if whole else offset

    def alarms(self) -> list[dict[str, Any]]:
        """The sentences of the alarms that its numbers raised, as the run raised them, by step."""
        alarms, sentences = Alarms(), []
        for record in self.metrics(0)[0]:
            sentences += [{"step": record.get("step"), "text": raised.text} for raised in alarms.observe(record)]
        return sentences

    def listed(self) -> dict[str, Any]:
        """Its line in the list of all."""
        summary, files = self.summary(), self.files()
        newest = max((path.stat().st_mtime for path in (self.path, *files.values()) if path.exists()), default=0.0)
        line = {"id": self.id, "kind": self.kind, "changed": newest, "files": len(files), "state": self.state(summary)}
        if self.kind == "run":
            records, _ = self.metrics(0)
            key = next((key for key in CURVE if any(key in record for record in records)), None)
            points = [record[key] for record in records if key in record] if key else []
            evals = summary.get("eval") or {}
            line |= {"steps": records[-1]["step"] if records else 0, "curve": points[-SHOWN:], "of": key}
            line |= {when: (evals.get(when) or {}).get("score") for when in ("before", "after")}
            line["alarms"] = sum(len(record.get("alarms", ())) for record in records)
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
    found: dict[str, Source] = {}
    for path in given:
        if not path.exists():
            raise ConfigError(f"there is nothing at {path}: name a run, an evaluation, a file of episodes, or a folder")
        if path.is_file() and path.suffix not in FILES:
            raise ConfigError(f"{path} is no file of episodes: those end in {' or '.join(FILES)}")
        for source in _in(path, str(path)):
            found[source.id] = source
    return found


def _in(path: Path, name: str) -> Iterator[Source]:
    if path.is_file():
        if path.suffix in FILES:
            yield Source(name, "file", path)
        return
    if (path / "metrics.jsonl").is_file() or (path / "rollouts").is_dir() or (path / "episodes.parquet").is_file():
        yield Source(name, "run", path)
    elif (path / "result.json").is_file() or (path / "episodes.jsonl").is_file():
        yield Source(name, "evaluation", path)
    else:  # a folder of several, or a run of several stages
        for inner in sorted(path.iterdir()):
            is_own = inner.name in ("model", "checkpoints", "logs") or inner.name.startswith(".")
            if not is_own and not (inner.is_file() and (path / "config.yaml").exists()):
                yield from _in(inner, f"{name}/{inner.name}")


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
