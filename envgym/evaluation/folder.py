"""An evaluation is a folder, written so that a kill at any moment leaves it readable and it can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from envgym.errors import RunError
from envgym.journal import Journal, episode_line
from envgym.recipes import read_yaml
from envgym.run_folder import write_atomically

from .plan import Part


class EvalFolder:
    """The files of one evaluation.

    config.yaml      every environment with its resolved settings
    episodes.jsonl   every episode, as it ended
    result.json      what came of it, for scripts
    result.csv       the same, a line for each environment
    inspect/         a log for each environment that `inspect view` shows
    logs/            the output of every child process
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.journal = Journal(path / "episodes.jsonl")
        self.result_file = path / "result.json"
        self.csv_file = path / "result.csv"
        self.inspect = path / "inspect"

    def create(self, parts: Sequence[Part], settings: Mapping[str, Any]) -> None:
        """Make the folder. Raises `RunError` where it exists or cannot be made."""
        if self.path.exists():
            raise RunError(
                f"evaluation folder {self.path} exists: choose another --name, or go on with --resume {self.path.name}"
            )
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise RunError(f"evaluation folder {self.path} cannot be made: {error.strerror}") from None
        saved = {**settings, "parts": [part.as_dict() for part in parts]}
        write_atomically(self.config_file, yaml.safe_dump(saved, sort_keys=False))

    def remove_stillborn(self) -> None:
        """Delete the folder where no episode ended and no process has said anything: nothing in it is worth a name."""
        said = [path for path in (self.path / "logs").glob("*") if path.stat().st_size]
        if not said and not self.journal.played():
            shutil.rmtree(self.path, ignore_errors=True)

    def read_config(self) -> dict[str, Any]:
        """What `create` was given. Raises `RunError` where this is no evaluation's folder."""
        if not self.config_file.is_file() or "parts" not in (saved := read_yaml(self.config_file)):
            raise RunError(f"{self.path} is not the folder of an evaluation")
        return saved

    def parts(self) -> list[Part]:
        return [Part.from_dict(part) for part in self.read_config()["parts"]]

    def forget_failed(self) -> None:
        """Take the episodes that failed out of the journal, in one rename, so that they are played again."""
        failed = {place for place, episode in self.journal.judged().items() if episode.failed}
        kept = [episode for place, episode in self.journal.played().items() if place not in failed]
        write_atomically(self.journal.path, "".join(map(episode_line, kept)))

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result_file, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        if not self.result_file.exists():
            return None
        result: dict[str, Any] = json.loads(self.result_file.read_text(encoding="utf-8"))
        return result


def find_folder(given: str, evals_dir: str) -> EvalFolder:
    """The evaluation that a name or a folder means. Raises `RunError` where there is none."""
    for path in (Path(given), Path(evals_dir) / given):
        if (path / "config.yaml").is_file():
            return EvalFolder(path)
    raise RunError(f"there is no evaluation {given!r} in {evals_dir}/, and no such folder")
