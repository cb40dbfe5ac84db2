"""Named task sets: a benchmark is a YAML file that names an environment, the rows, and how they are read.

The entry points `envgym.task_sets` of packages name modules whose folders hold such files; the name of a file is the
name of its task set. A user's own file is named by its path.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from envgym.errors import ConfigError, DataError, SettingsNote, did_you_mean
from envgym.loading import entry_points, load_function
from envgym.settings import Settings, validate_settings
from envgym.yaml_files import read_yaml

from .config import DataConfig, data_settings

SUFFIXES = (".yaml", ".yml")
FILES = (".jsonl", ".parquet", ".csv", ".json")
PATHS = ("path", "test_path", "sources")
PLACES = ("folder", *PATHS)
SPLITS = ("split", "test_split", "few_shot_split")
HELD_OUT = {"test_path", "test_split", "test_fraction", "test_select"}
"""Settings of `data` that say what is held out."""


class NamedTaskSet(Settings):
    """A task set as its file describes it."""

    description: str
    env: Annotated[dict[str, Any], BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]
    """The environment, `name`, and its settings."""
    data: dict[str, Any] = Field({})
    """Settings of `data`: they say how the rows are read and, unless the caller does, where they are."""
    rows: str | None = None
    """For a publication whose files are not read as rows: the function (`package.module:name`) that returns the rows of
    a folder with them."""
    train_on: str | None = None
    """For a task set whose rows are all held out: one to train on, or an environment."""
    sampling: dict[str, float] = Field({})
    """Sampling parameters of evaluations: temperature, top_p, top_k, max_tokens."""
    source: str = ""
    """The publication."""
    licence: str = ""
    """The licence of the rows."""
    published_reading: str = ""
    """The place from which published scores read the answer, and the settings that read it there."""
    template_of: str = "ours"
    """The author of the prompt's wording."""

    _name: str = PrivateAttr("")

    @property
    def name(self) -> str:
        return self._name

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The environment's settings, of which the caller's `settings` win. Raises `DataError` for a folder without its
        files."""
        data = dict(data_settings(settings.get("data") or {}))
        if not any(data.get(name) for name in PLACES):
            data = data_settings({name: self.data[name] for name in (*PLACES, *SPLITS) if name in self.data}) | data
        if data.get("folder") is not None:
            folder = Path(data.pop("folder")).expanduser()
            if not (files := self.files(folder)) and not (files := self._published_files(folder)):
                names = f"{self.name}.jsonl" if self.train_on else f"{self.name}_train.jsonl or {self.name}_test.jsonl"
                names += f", nor a folder {self.name} with the files of its authors" if self.rows else ""
                raise DataError(f"data.folder: there is no file {names} in {folder}")
            data |= data_settings(files)
        elif self.train_on and "path" in data and "test_path" not in data:
            data["test_path"] = data.pop("path")
        elif not any(data.get(name) for name in PATHS):
            file = {"test_path": f"{self.name}.jsonl"} if self.train_on else {"path": f"{self.name}_train.jsonl"}
            data = file | data
        elif Path(data.get("path") or "").is_file() and not data.keys() & HELD_OUT and "test_select" not in self.data:
            share = DataConfig.model_fields["test_fraction"].default
            note = f"{self.name}: {share:.0%} of data.path are held out; a test file is data.test_path=FILE"
            warnings.warn(SettingsNote(note), stacklevel=2)
        fields = {name: value for name, value in self.env.items() if name != "name" and name not in settings}
        if '"command":' in (text := json.dumps(fields, default=str)):  # of an MCP server, also of a part of a mixture
            warnings.warn(SettingsNote(f"{self.name}: this task set starts programs: {text}"), stacklevel=2)
        reading = {name: value for name, value in self.data.items() if name not in (*PLACES, *SPLITS)}
        return {**fields, **settings, "data": {**reading, **data}}

    def files(self, folder: Path) -> dict[str, str]:
        """The paths of the files in `folder`, as settings of `data`; empty without any."""
        train, test, unsplit = (_find(folder, self.name + ending) for ending in ("_train", "_test", ""))
        if self.train_on:
            train, test = None, test or unsplit
        elif unsplit and not (train or test):
            train, test = unsplit, unsplit if "test_select" in self.data else None
        return {name: path for name, path in (("path", train), ("test_path", test)) if path}

    def _published_files(self, folder: Path) -> dict[str, Any]:
        """The same, of the rows in the authors' own files in `folder` or its sub-folder with the task set's name."""
        places = [folder / self.name, folder] if self.rows else []
        for place in places:
            if rows := list(load_function(str(self.rows), "function of rows")(place)):
                return {"test_path" if self.train_on else "path": rows}
        return {}


def _find(folder: Path, stem: str) -> str | None:
    return next((str(path) for suffix in FILES if (path := folder / f"{stem}{suffix}").is_file()), None)


def is_task_set_file(name: str) -> bool:
    return name.endswith(SUFFIXES)


def read_task_set(path: Path) -> NamedTaskSet:
    """The task set of a file. Raises `ConfigError` for an unreadable file and for unknown or invalid keys."""
    task_set = validate_settings(NamedTaskSet, read_yaml(path), f"task set {path}")
    if "name" not in task_set.env:
        raise ConfigError(f"task set {path}: env names no environment: env: {{name: …}}")
    if unknown := [key for key in task_set.data if key not in DataConfig.model_fields]:
        hint = did_you_mean(unknown[0], DataConfig.model_fields)
        raise ConfigError(f"task set {path}: unknown key 'data.{unknown[0]}'.{hint}")
    task_set._name = path.stem
    return task_set


@cache
def task_set_files() -> dict[str, Path]:
    """The files of the installed task sets, by name."""
    files: dict[str, Path] = {}
    for module in entry_points("envgym.task_sets").values():
        spec = importlib.util.find_spec(module)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            files |= {path.stem: path for path in sorted(Path(folder).iterdir()) if path.suffix in SUFFIXES}
    return files
