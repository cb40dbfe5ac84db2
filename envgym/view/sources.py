"""Sources of the page: runs, evaluations and files of episodes, and the content of their folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envgym.disk import lock_holder
from envgym.errors import ConfigError, DataError, EnvgymError
from envgym.images import FOLDER, SUFFIXES, ImageFolder
from envgym.monitoring.alarms import metric_and_sentence
from envgym.net.client import json_object
from envgym.run_folder import files_by_step
from envgym.types.images import MAX_BYTES, read_image
from envgym.yaml_files import read_yaml

from . import reading
from .reading import complete_lines, is_within, leads_out, regular
from .settings import stage_settings

CURVE = ("eval/score", "score/mean", "reward/mean", "loss")
"""Candidates for the small curve of a run; the first available one is shown."""
JUDGES = ("eval/score", "eval/accuracy", "eval/margin", "eval/loss")
"""What runs are judged by on held-out tasks; supervised ones have no score."""
LISTED = ("recipe", "env.name", "learner.name", "model")
"""Settings in the list of all sources."""
FILES = (".jsonl", ".parquet")
SHOWN = 48
"""Number of points of that curve; also the most checkpoints and logs of a run."""
LINES = 30
"""Number of the last lines of a log."""
WALKED = 20_000
"""Maximum number of files and folders to search in a folder, and in each of its sub-folders with all below."""
DEPTH = 8
"""Maximum depth of the search."""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that the page shows: a stage of a run (`run`), its evaluations on held-out tasks (`held-out`), an
    evaluation, or a `file` of episodes.

    `id`, its name on the page, is the path as the user named it. Only regular files within the `roots` are read. The
    page lists a `link` that leads out of them, or something `unreadable`, with the reason in `why`, and shows no more
    of it.
    """

    id: str
    kind: str
    path: Path
    roots: tuple[Path, ...]
    why: str = ""

    def file(self, name: str, max_bytes: int) -> Path | None:
        """A file of its folder; None if it does not exist. Raises `DataError` for a file that must not be read."""
        path = self.path / name
        return regular(path, self.roots, max_bytes) if self.kind != "file" and os.path.lexists(path) else None

    def files(self) -> dict[int, Path]:
        """Files of episodes by training step; step 0 without steps."""
        if self.kind == "file":
            return {0: self.path}
        if self.kind == "evaluation":
            return {0: self.path / "episodes.jsonl"}
        folder = self.path if self.kind == "held-out" else self.path / "rollouts"
        single_file = self.path / "episodes.parquet"
        if not is_within(folder, self.roots):
            raise DataError(leads_out(folder))
        return files_by_step(folder, ".parquet") or ({0: single_file} if single_file.is_file() else {})

    def step_file(self, folder: str, step: int) -> Path | None:
        """The file of a step in `folder` (`events`, `learned`); None if it does not exist."""
        suffix, limit = (".jsonl", reading.EVENTS) if folder == "events" else (".parquet", reading.GROUP)
        return self.file(f"{folder}/step_{step:06d}{suffix}", limit)

    def image(self, name: str) -> tuple[bytes, str]:
        """The content of one of its images, by name, and its media type. Raises `DataError` if there is none, or its
        file is another one or must not be read."""
        roots, folder = self.roots, (self.path.parent if self.kind == "held-out" else self.path) / FOLDER
        if self.kind == "file":  # who names a file names the folder beside it, unless that is a link
            folder = self.path.with_name(f"{self.path.name}.{FOLDER}")
            roots = (*roots, Path(os.path.realpath(folder.parent)) / folder.name)
        if (path := ImageFolder(folder).find(name)) is None:
            raise DataError(f"{self.id} has no image {name!r:.80}")
        content = read_image(regular(path, roots, MAX_BYTES), name)
        return content, next(kind for kind, suffix in SUFFIXES.items() if path.suffix == suffix)

    def summary(self) -> dict[str, Any]:
        """`summary.json` of a run, `result.json` of an evaluation; empty before its end."""
        file = self.file("result.json" if self.kind == "evaluation" else "summary.json", reading.SUMMARY)
        return {} if file is None else json_object(file.read_bytes()) or {}

    def config(self) -> dict[str, Any]:
        """The settings, from `config.yaml`; empty for a file of episodes, and where there is none. Raises `DataError`
        for a link that leads out of the roots."""
        file = self._config_file()
        return {} if file is None else _read_config(regular(file, self.roots), file.stat().st_mtime_ns)

    def _config_file(self) -> Path | None:
        for folder in (self.path, self.path.parent):  # a stage's settings are in the folder above
            file = folder / "config.yaml"
            if self.kind != "file" and os.path.lexists(file) and (folder == self.path or is_within(file, self.roots)):
                return file
        return None

    def tokenizer(self) -> Path | None:
        """The tokenizer's file, if there is one. Older runs have it in the model's folder only."""
        if self.kind == "held-out":
            return self.file("../tokenizer.json", reading.TOKENIZER)
        return self.file("tokenizer.json", reading.TOKENIZER) or self.file("model/tokenizer.json", reading.TOKENIZER)

    def records(self, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records of `metrics.jsonl` from a byte `offset` on, each with the offset after it. It skips lines that
        are no record (after a resume the offset may be within a line), and values other than numbers and lists."""
        if self.kind == "run" and (path := self.file("metrics.jsonl", reading.METRICS)) is not None:
            for _, end, line in complete_lines(path, reading.RECORD, offset):
                record = json_object(line) or {}
                if isinstance(record.get("step"), int):
                    yield end, {name: value for name, value in record.items() if _is_plain(value)}

    def metrics(self, offset: int) -> dict[str, Any]:
        """The records from a byte `offset` on, the offset after the last one, and the run's state."""
        records = list(self.records(offset))
        end = records[-1][0] if records else offset
        return {"records": [record for _, record in records], "offset": end, "state": self.state(self.summary())}

    def alarms(self) -> list[dict[str, Any]]:
        """The run's alarms, by step: each with the metric that it is about, and its text."""
        raised = ((record, name) for _, record in self.records() for name in _list_value(record, "alarms"))
        alarms = ((record["step"], metric_and_sentence(name, record)) for record, name in raised)
        return [{"step": step, "metric": alarm[0], "text": alarm[1]} for step, alarm in alarms if alarm]

    def checkpoints(self) -> list[str]:
        """The names of its checkpoints, newest first; `best` is added to that of the best one."""
        folder = self.path / "checkpoints"
        if not folder.is_dir() or not is_within(folder, self.roots):
            return []
        best = folder / "best"
        target = os.path.basename(os.readlink(best)) if best.is_symlink() else ""
        names = sorted((name for name in os.listdir(folder) if name.startswith("step_")), reverse=True)
        return [f"{name} (best)" if name == target else name for name in names[:SHOWN]]

    def logs(self) -> list[dict[str, str]]:
        """The last lines of the output of its processes, the latest first; empty outputs are left out."""
        folder = self.path / "logs"
        paths = sorted(folder.glob("*.log"))[:SHOWN] if self.kind == "run" else []
        files = [path for path in paths if path.is_file() and is_within(path, self.roots)]
        tails = []
        for path in sorted(files, key=lambda path: -path.stat().st_mtime):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - reading.TAIL))
                lines = file.read(reading.TAIL).decode(errors="replace").replace("\r", "\n").splitlines()
            if text := "\n".join(line for line in lines[-LINES:] if line.strip()):
                tails.append({"name": path.name, "text": text})
        return tails

    def list_line(self) -> dict[str, Any]:
        """Its line in the list of all sources."""
        summary, files = self.summary(), self.files()
        last = [files[max(files)]] if files else []
        mtime = max((path.stat().st_mtime for path in (self.path, *last) if path.exists()), default=0.0)
        line = {"id": self.id, "kind": self.kind, "changed": mtime, "files": len(files), "state": self.state(summary)}
        if self.kind == "run":
            line |= self._training_line(summary)
        elif self.kind == "held-out":
            line["steps"] = max(files, default=0)
        elif self.kind == "evaluation":
            envs = summary.get("envs")
            line |= {"after": summary.get("score"), "model": summary.get("model"), "seconds": summary.get("seconds")}
            line["env"] = ", ".join(map(str, envs)) if isinstance(envs, dict) else None
        return line

    def _training_line(self, summary: dict[str, Any]) -> dict[str, Any]:
        """A run's part of its line: its settings and times, its progress, and the first and the last value of what it
        is judged by."""
        curves: dict[str, list[Any]] = {key: [] for key in (*CURVE, *JUDGES)}
        step = alarms = 0
        for _, record in self.records():
            step, alarms = record["step"], alarms + len(_list_value(record, "alarms"))
            for key in curves.keys() & record.keys():
                curves[key].append(record[key])
        curve = next((curves[key] for key in CURVE if curves[key]), [])
        evals = summary.get("eval") or {}
        ends = {moment: (evals.get(moment) or {}).get("score") for moment in ("before", "after")}
        settings: dict[str, Any] = {}
        with contextlib.suppress(EnvgymError):  # the run's page says what is wrong with them
            settings = stage_settings(self.config(), self.path.name)
        begin, end = self._config_file(), self.file("metrics.jsonl", reading.METRICS)
        started = begin.stat().st_mtime if begin else None  # it is written at the start
        so_far = end.stat().st_mtime - started if end and started else None
        return {
            **{key.removesuffix(".name"): settings.get(key) for key in LISTED},
            "judged": [(key.removeprefix("eval/"), curves[key][0], curves[key][-1]) for key in JUDGES if curves[key]]
            or [("score", ends["before"], ends["after"])] * (ends["after"] is not None),
            "started": started,
            "seconds": (summary.get("seconds") or {}).get("total", so_far),
            "steps": step,
            "curve": curve[-SHOWN:],
            "alarms": alarms,
        }

    def state(self, summary: dict[str, Any]) -> str:
        if self.kind in ("file", "held-out"):
            return "file"
        if lock_holder(self.path) is not None or lock_holder(self.path.parent) is not None:
            return "running"
        return str(summary.get("status", "completed")) if summary else "unfinished"


def find(paths: Sequence[Path]) -> dict[str, Source]:
    """Sources at these paths, by id. Raises `ConfigError` for a path that does not exist."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is nothing at {path}: name a run, an evaluation, a file of episodes, or a folder")
        if path.is_file() and path.suffix not in FILES:
            raise ConfigError(f"{path} is not a file of episodes: these end in {' or '.join(FILES)}")
    roots = tuple(Path(os.path.realpath(path)) for path in paths)
    return {source.id: source for path in paths for source in _walk(path, str(path), roots, iter(range(WALKED)))}


def _walk(path: Path, name: str, roots: tuple[Path, ...], budget: Iterator[int], depth: int = 0) -> Iterator[Source]:
    """The sources at and below `path`, whose name is `name`. A link to a source within the `roots` is followed, to
    another folder it is not, as it may lead back. Each visited file or folder takes one item of the `budget`."""
    text = name.encode(errors="replace").decode()
    try:
        is_link = depth > 0 and path.is_symlink()
        if is_link and not is_within(path, roots):
            yield Source(text, "link", path, roots, leads_out(path))
        elif (kind := _kind(path)) is not None:
            if text != name or "|" in name:
                raise DataError("its name contains '|' or invalid characters: rename it")
            yield Source(name, kind, path, roots)
            if kind == "run" and (path / "held_out").is_dir():
                yield Source(f"{name}/held_out", "held-out", path / "held_out", roots)
        elif path.is_dir() and not is_link and depth < DEPTH:  # a folder of sources, or a run of several stages
            for inner in _entries(path, budget):
                inner_budget = budget if depth else iter(range(WALKED))
                yield from _walk(inner, f"{name}/{inner.name}", roots, inner_budget, depth + 1)
    except (OSError, DataError) as error:
        yield Source(text, "unreadable", path, roots, str(error))


def _entries(folder: Path, budget: Iterator[int]) -> list[Path]:
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if next(budget, None) is None:
                raise DataError(f"{folder}: there are more than {WALKED:,} files and folders here: name one of them")
            names.append(entry.name)
    paths = [folder / name for name in sorted(names) if name not in ("model", "checkpoints", "logs") and name[0] != "."]
    is_run = (folder / "config.yaml").exists()
    return [path for path in paths if not (is_run and path.is_file())]


def _kind(path: Path) -> str | None:
    """The kind of source at a path; None for any other folder or file."""
    if path.is_file():
        return "file" if path.suffix in FILES else None
    if (path / "metrics.jsonl").is_file() or (path / "rollouts").is_dir() or (path / "episodes.parquet").is_file():
        return "run"
    return "evaluation" if any((path / name).is_file() for name in ("result.json", "episodes.jsonl")) else None


@lru_cache(256)
def _read_config(file: Path, mtime_ns: int) -> dict[str, Any]:
    return read_yaml(file)


def _list_value(record: dict[str, Any], key: str) -> list[Any]:
    return record[key] if isinstance(record.get(key), list) else []


def _is_plain(value: Any) -> bool:
    """True for a number, or a list of numbers and texts."""
    if isinstance(value, list):
        return all(isinstance(item, int | float | str) for item in value)
    return isinstance(value, int | float)
