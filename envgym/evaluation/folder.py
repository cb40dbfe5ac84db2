"""An evaluation is a folder, written so that a kill at any moment leaves it readable and it can go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from envgym.config.recipes import read_yaml
from envgym.disk import locked, write_atomically
from envgym.episodes.journal import Journal, episode_line
from envgym.errors import RunError
from envgym.types import Episode

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

    def remove_stillborn(self) -> bool:
        """Delete the folder where no episode ended: nothing in it is worth a name. Whether that was so.

        Where a process has failed, an error names its log, and the folder stays.
        """
        if self.journal.played():
            return False
        if not any(path.stat().st_size for path in (self.path / "logs").glob("*")):
            shutil.rmtree(self.path, ignore_errors=True)
        return True

    def read_config(self) -> dict[str, Any]:
        """What `create` was given. Raises `RunError` where this is no evaluation's folder."""
        saved = read_yaml(self.config_file)
        if not isinstance(saved.get("parts"), list) or not saved["parts"]:
            raise RunError(f"{self.path} is not the folder of an evaluation")
        return saved

    def parts(self) -> list[Part]:
        """The parts that `create` was given. Raises `RunError` where they cannot be read."""
        try:
            return [Part.from_dict(part) for part in self.read_config()["parts"]]
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{self.config_file} is damaged ({type(error).__name__}): start a new evaluation") from None

    @property
    def how_to_go_on(self) -> str:
        return f"go on with: envgym eval --resume {self.path}"

    def held(self) -> AbstractContextManager[None]:
        """Nobody else evaluates here meanwhile. Raises `RunError` where somebody does."""
        return locked(self.path, "envgym eval")

    def write_journal(self, episodes: Iterable[Episode]) -> None:
        """Let the journal hold these and no others, in one rename."""
        write_atomically(self.journal.path, "".join(map(episode_line, episodes)))

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result_file, json.dumps(result, indent=2) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """What `write_result` was given last. Raises `RunError` where it is not an evaluation's."""
        if not self.result_file.exists():
            return None
        try:
            result = json.loads(self.result_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            result = None
        if not isinstance(result, dict) or not {"status", "began", "seconds"} <= result.keys():
            raise RunError(
                f"{self.result_file} is damaged or not of an evaluation: delete it to go on from the episodes"
            )
        return result


def find_folder(given: str, evals_dir: str) -> EvalFolder:
    """The evaluation that a name or a folder means. Raises `RunError` where there is none."""
    for path in (Path(given), Path(evals_dir) / given):
        if (path / "config.yaml").is_file():
            EvalFolder(path).read_config()
            return EvalFolder(path)
    raise RunError(f"there is no evaluation {given!r} in {evals_dir}/, and no such folder")
