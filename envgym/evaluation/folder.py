"""The folder of an evaluation, written so that after a kill at any moment it is readable and can be resumed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import yaml

from envgym.config.schema import RunConfig
from envgym.disk import write_atomically
from envgym.errors import ConfigError, RunError, reported_as
from envgym.yaml_files import read_yaml

from .plan import Part
from .resumable import ResumableFolder


class EvalFolder(ResumableFolder):
    """The files of one evaluation.

    config.yaml      every environment with its resolved settings
    episodes.jsonl   every episode, written when it ends
    result.json      the result, for scripts
    result.csv       the same, a line for each environment
    inspect/         with `eval.inspect_logs`: a log for each environment that `inspect view` shows
    logs/            the output of every child process
    """

    command = "envgym eval"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.disposable = False
        self.config_file = path / "config.yaml"
        self.result_file = path / "result.json"
        self.csv_file = path / "result.csv"
        self.inspect_folder = path / "inspect"
        self.suite: str | None = None
        """The name of the suite; None for a single environment."""
        self._parts: list[dict[str, Any]] = []

    def create(self, parts: Sequence[Part], suite: str | None) -> None:
        """Create the folder. Raises `RunError` if it exists or cannot be created."""
        if self.path.exists():
            raise RunError(
                f"evaluation folder {self.path} exists: choose another --name, or resume with --resume {self.path.name}"
            )
        with reported_as(RunError, f"evaluation folder {self.path} cannot be created"):
            self.path.mkdir(parents=True)
        self.suite, self.parts, self.disposable = suite, list(parts), True
        saved = {"suite": suite, "parts": [part.model_dump(mode="json") for part in parts]}
        write_atomically(self.config_file, yaml.safe_dump(saved, sort_keys=False))

    def load(self) -> Self:
        """Read the arguments of `create`. Raises `RunError` if this is not the folder of an evaluation."""
        saved = read_yaml(self.config_file)
        if not isinstance(saved.get("parts"), list) or not saved["parts"]:
            raise RunError(f"{self.path} is not the folder of an evaluation")
        self.suite, self._parts = saved.get("suite"), saved["parts"]
        return self

    @functools.cached_property
    def parts(self) -> list[Part]:
        """The parts, all for one model. Raises `RunError` if they cannot be read."""
        try:
            return [Part(**part) for part in self._parts]
        except (TypeError, ValueError):
            problem = f"{self.config_file} is damaged, or not of this version of envgym ({version('envgym')})"
            raise RunError(f"{problem}: start a new evaluation") from None

    @property
    def config(self) -> RunConfig:
        """The settings of the first part; all parts have its model and engine."""
        return self.parts[0].config

    @property
    def resume_hint(self) -> str:
        return f"resume with: envgym eval --resume {self.path}"

    def on_mismatch(self, problem: str) -> None:
        raise ConfigError(f"{self.path} holds episodes that {problem}: start a new evaluation")

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result_file, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """The last written result, if any. Raises `RunError` if the file is damaged."""
        if not self.result_file.exists():
            return None
        try:
            result = json.loads(self.result_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            result = None
        if not isinstance(result, dict) or not {"status", "began", "seconds"} <= result.keys():
            raise RunError(
                f"{self.result_file} is damaged or not of an evaluation: delete it to resume from the episodes"
            )
        return result


def find_folder(name: str, evals_dir: str) -> EvalFolder:
    """The evaluation of this name or path. Raises `RunError` if there is none."""
    for path in (Path(name), Path(evals_dir) / name):
        if (path / "config.yaml").is_file():
            return EvalFolder(path).load()
    raise RunError(f"there is no evaluation {name!r} in {evals_dir}/, and no such folder")
