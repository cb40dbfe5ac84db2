"""Folders of episodes from which a command resumes: a kill at any moment loses no finished episode."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from envgym.disk import folder_lock, write_atomically
from envgym.env import EnvSpec
from envgym.episodes.files import write_episodes
from envgym.episodes.journal import EpisodeKey, Journal
from envgym.errors import ConfigError, DataError, RunError, WorkerError, extend_message, reported_as
from envgym.hashing import model_hash, task_hash
from envgym.rollout.runner import group_ids
from envgym.types import Episode, Task
from envgym.yaml_files import read_yaml


class ResumableFolder(ABC):
    """A folder of finished episodes (`episodes.jsonl`) and the output of every child process (`logs/`)."""

    command = "envgym"
    """The command that writes to it, for error messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path / "episodes.jsonl")
        self.saved: dict[EpisodeKey, Episode] = {}
        """The episodes that need not be run again."""
        self.disposable = True
        """True if the folder is deleted when it holds no finished episode."""
        self.model_hash: str | None = None
        """Hash of the sampled weights (`check_model`)."""
        self.logs = path / "logs"

    @property
    def resume_hint(self) -> str:
        return "the same command resumes from there"

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder for one command. Raises `RunError` if another one holds it."""
        return folder_lock(self.path, self.command)

    @abstractmethod
    def on_mismatch(self, problem: str) -> None:
        """Discard the saved episodes, for this `problem`. Raises `EnvgymError` if they must not be lost."""

    def check_tasks(self, purpose: str, tasks: Sequence[Task], spec: EnvSpec) -> None:
        """Call `on_mismatch` if the data or the environment changed since the saved episodes of `purpose` were run."""
        tasks_by_group = group_ids(purpose, tasks)
        fingerprints: dict[int, dict[str, str]] = {}
        for episode in self.saved.values():
            if episode.purpose != purpose:
                continue
            task = tasks_by_group.get(episode.group_id)
            if task is None or episode.fingerprints.get("task") != task_hash(task):
                return self.on_mismatch(f"are of other tasks (one was {episode.task.key})")
            member = spec.spec_for(task)
            if id(member) not in fingerprints:
                fingerprints[id(member)] = member.fingerprint()
            if any(episode.fingerprints.get(name) != value for name, value in fingerprints[id(member)].items()):
                return self.on_mismatch(f"were run before the code or the settings of environment {member.id} changed")
        return None

    def check_model(self, model: str) -> None:
        """Call `on_mismatch` if saved episodes were sampled from other weights than those of `model`."""
        self.model_hash = model_hash(model)
        if any(episode.fingerprints.get("model", "") != (self.model_hash or "") for episode in self.saved.values()):
            self.on_mismatch("were sampled before the model's weights changed")

    def write(self, episode: Episode) -> None:
        """Save an episode when it ends, and again after its group was judged."""
        if self.model_hash is not None:
            episode.fingerprints["model"] = self.model_hash
        self.journal.write(episode)

    @contextlib.contextmanager
    def recover(self) -> Iterator[None]:
        """However the block ends, keep the folder if it has episodes, else delete it if `disposable`. Ctrl-C and the
        errors of workers and disks name the folder and the command that resumes."""
        try:
            self.logs.mkdir(exist_ok=True)
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._clean_up()) from None
        except WorkerError as error:
            raise extend_message(error, self._clean_up(keep_logs=True)) from None  # the error names a log file
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            raise RunError(f"{problem}; {self._clean_up()}") from error
        except Exception:
            self._clean_up()
            raise

    def _clean_up(self, *, keep_logs: bool = False) -> str:
        if self.journal.path.exists() and self.journal.path.stat().st_size:
            return self.describe_saved()
        has_logs = any(path.stat().st_size for path in self.logs.glob("*"))
        if self.disposable and not (keep_logs and has_logs):
            shutil.rmtree(self.path, ignore_errors=True)
        return "no episode was finished"

    def describe_saved(self) -> str:
        try:
            return f"{len(self.journal.originals())} episodes are saved in {self.path}; {self.resume_hint}"
        except DataError as error:
            return str(error)


class UnfinishedFile(ResumableFolder):
    """The folder `FILE.unfinished`, beside a file of episodes that is not complete yet."""

    def __init__(self, file: Path, *, overwrite: bool) -> None:
        super().__init__(file.with_name(file.name + ".unfinished"))
        self._file = file
        self._overwrite = overwrite
        self._settings_file = self.path / "settings.yaml"

    @contextlib.contextmanager
    def open(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Lock the folder and load its episodes, which must be of these `settings`. Raises `RunError` if they are of
        others or cannot be read, unless they may be overwritten."""
        with reported_as(RunError, f"{self.path}, the folder for unfinished episodes, cannot be created"):
            self.path.mkdir(exist_ok=True)
        with self.lock(), self.recover():
            self._open(settings)
            yield

    def _open(self, settings: Mapping[str, Any]) -> None:
        """Load the saved episodes, or call `on_mismatch` if they cannot be used; write the settings and open the
        journal."""
        try:
            self.saved = self.journal.originals()
        except DataError as error:
            self.on_mismatch(f"cannot be read ({error})")
        if self.saved:
            old: Mapping[str, Any] = {}
            with contextlib.suppress(ConfigError):
                old = read_yaml(self._settings_file)
            if not old:
                self.on_mismatch(f"cannot be resumed, because {self._settings_file} is missing or damaged")
            elif differences := _differences(old, settings):
                self.on_mismatch(f"were run with other settings ({'; '.join(differences)})")
        write_atomically(self._settings_file, yaml.safe_dump(dict(settings), sort_keys=False))
        self.journal.open()

    def on_mismatch(self, problem: str) -> None:
        if not self._overwrite:
            raise RunError(
                f"{self.path} holds episodes that {problem}: name another file, or start again with --overwrite"
            )
        self.journal.path.write_bytes(b"")
        self.saved = {}

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Write the file and delete this folder. Raises `DataError`, which names this folder, if that fails."""
        try:
            write_episodes(self._file, episodes)
        except DataError as error:
            raise DataError(f"{error}; {self.describe_saved()}") from None
        shutil.rmtree(self.path, ignore_errors=True)


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """`key was 1 and is 2` for every difference."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        dot = f"{key}." if key else ""
        return [text for name in names for text in _differences(old.get(name), new.get(name), f"{dot}{name}")]
    return [] if old == new else [f"{key} was {old!r:.60} and is {new!r:.60}"]
