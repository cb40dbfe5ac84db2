"""Folders of episodes that a command goes on from: a kill at any moment loses none that had ended."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from envgym.disk import locked, write_atomically
from envgym.env import EnvSpec
from envgym.episodes.files import write_episodes
from envgym.episodes.journal import EpisodeKey, Journal
from envgym.errors import ConfigError, DataError, RunError, WorkerError, extended, reported_as
from envgym.hashing import model_hash, task_hash
from envgym.rollout.runner import group_ids
from envgym.types import Episode, Task
from envgym.yaml_files import read_yaml


class ResumableFolder(ABC):
    """Episodes as they end (`episodes.jsonl`), and the output of every child process (`logs/`)."""

    command = "envgym"
    """The command that plays into it, as an error names it to another one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path / "episodes.jsonl")
        self.kept: dict[EpisodeKey, Episode] = {}
        """The episodes that are not played again."""
        self.disposable = True
        """The folder goes where no episode has ended in it."""
        self.model_hash: str | None = None
        """The weights that are sampled (`check_model`)."""
        self.logs = path / "logs"

    @property
    def how_to_go_on(self) -> str:
        return "the same command goes on from there"

    def locked(self) -> AbstractContextManager[None]:
        """Keep other commands out. Raises `RunError` where one is in."""
        return locked(self.path, self.command)

    @abstractmethod
    def differs(self, how: str) -> None:
        """Refuse to go on from what is here, or forget it. Raises `EnvgymError` where it cannot be forgotten."""

    def check_tasks(self, purpose: str, tasks: Sequence[Task], spec: EnvSpec) -> None:
        """Mix no episodes of an environment or of data that have changed since they were played for `purpose`."""
        posed = group_ids(purpose, tasks)
        now: dict[int, dict[str, str]] = {}
        for episode in self.kept.values():
            if episode.purpose != purpose:
                continue
            task = posed.get(episode.group)
            if task is None or episode.fingerprints.get("task") != task_hash(task):
                return self.differs(f"posed other tasks (one was {episode.task.key})")
            part = spec.of(task)
            if id(part) not in now:
                now[id(part)] = part.fingerprint()
            if any(episode.fingerprints.get(name) != value for name, value in now[id(part)].items()):
                return self.differs(f"were played before the code of environment {part.id} changed, or its settings")
        return None

    def check_model(self, model: str) -> None:
        """Mix no episodes of other weights."""
        self.model_hash = model_hash(model)
        if any(episode.fingerprints.get("model", "") != (self.model_hash or "") for episode in self.kept.values()):
            self.differs("were sampled from other weights, which were the model's then")

    def write(self, episode: Episode) -> None:
        """Keep an episode that has ended, or that was judged since."""
        if self.model_hash is not None:
            episode.fingerprints["model"] = self.model_hash
        self.journal.write(episode)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Leave the episodes that had ended, whatever ends what is done in here, or no folder where none had. Ctrl-C
        and the errors of workers and disks say what is kept, and how to go on."""
        try:
            self.logs.mkdir(exist_ok=True)
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._leave()) from None
        except WorkerError as error:
            raise extended(error, self._leave(keep_logs=True)) from None  # it names one
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
            raise RunError(f"{problem}; {self._leave()}") from error
        except Exception:
            self._leave()
            raise

    def _leave(self, *, keep_logs: bool = False) -> str:
        if self.journal.path.exists() and self.journal.path.stat().st_size:
            return self.what_is_kept()
        has_logs = any(path.stat().st_size for path in self.logs.glob("*"))
        if self.disposable and not (keep_logs and has_logs):
            shutil.rmtree(self.path, ignore_errors=True)
        return "no episode had ended"

    def what_is_kept(self) -> str:
        try:
            return f"{len(self.journal.played())} episodes are kept in {self.path}; {self.how_to_go_on}"
        except DataError as error:
            return str(error)


class UnfinishedFile(ResumableFolder):
    """The folder `FILE.unfinished` beside a file of episodes that is not whole yet."""

    def __init__(self, file: Path, *, overwrite: bool) -> None:
        super().__init__(file.with_name(file.name + ".unfinished"))
        self._file = file
        self._overwrite = overwrite
        self._settings_file = self.path / "settings.yaml"

    @contextlib.contextmanager
    def begun(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """The folder, locked, to play in; what is here is gone on from where it was made with these settings. Raises
        `RunError` where it was not, or cannot be read, unless it may be overwritten."""
        with reported_as(RunError, f"{self.path}, where episodes are kept, cannot be made"):
            self.path.mkdir(exist_ok=True)
        with self.locked(), self.playing():
            self._begin(settings)
            yield

    def _begin(self, settings: Mapping[str, Any]) -> None:
        try:
            self.kept = self.journal.played()
        except DataError as error:
            self.differs(f"cannot be read ({error})")
        if self.kept:
            old: Mapping[str, Any] = {}
            with contextlib.suppress(ConfigError):
                old = read_yaml(self._settings_file)
            if not old:
                self.differs(f"cannot go on, since {self._settings_file} is missing or damaged")
            elif changed := _differences(old, settings):
                self.differs(f"were played with other settings ({'; '.join(changed)})")
        write_atomically(self._settings_file, yaml.safe_dump(dict(settings), sort_keys=False))
        self.journal.open()

    def differs(self, how: str) -> None:
        if not self._overwrite:
            raise RunError(f"{self.path} holds episodes that {how}: name another file, or begin anew with --overwrite")
        self.journal.path.write_bytes(b"")
        self.kept = {}

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Write the file, in place of this folder. Raises `DataError` where it cannot be, which says what is kept."""
        try:
            write_episodes(self._file, episodes)
        except DataError as error:
            raise DataError(f"{error}; {self.what_is_kept()}") from None
        shutil.rmtree(self.path, ignore_errors=True)


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """`key was 1 and is 2` for what differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        dot = f"{key}." if key else ""
        return [text for name in names for text in _differences(old.get(name), new.get(name), f"{dot}{name}")]
    return [] if old == new else [f"{key} was {old!r:.60} and is {new!r:.60}"]
