"""What a command that writes episodes to a file keeps beside it until it is whole: a kill loses none that had ended."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from envgym.disk import locked, write_atomically
from envgym.env import EnvSpec
from envgym.errors import DataError, RunError, WorkerError
from envgym.evaluation.model_fingerprint import model_fingerprint
from envgym.hashing import first_change
from envgym.types import Episode, Task

from .files import write_episodes
from .journal import Journal, Place


class Unfinished:
    """The folder `FILE.unfinished`: settings, episodes, workers' logs."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.path = out.with_name(out.name + ".unfinished")
        self._out = out
        self._overwrite = overwrite
        self.journal = Journal(self.path / "episodes.jsonl")
        self.played: dict[Place, Episode] = {}
        """The episodes that were here at the beginning."""
        self._settings_file = self.path / "settings.yaml"
        self._model_file = self.path / "model"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. Raises `RunError` where somebody does."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.path}, where episodes are kept, cannot be made: {error.strerror}") from None
        with locked(self.path, "envgym"):
            yield

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Go on with what is here where it was made with these settings. Raises `RunError` where it was not, or cannot
        be read, unless it may be overwritten."""
        try:
            self.played = self.journal.played()
        except DataError as error:
            self.differs(f"cannot be read ({error})")
        if self.played:
            old = self._settings()
            if old is None:
                self.differs(f"cannot go on, since {self._settings_file} is missing or damaged")
            elif changed := _differences(old, settings):
                self.differs(f"were played with other settings ({'; '.join(changed)})")
        try:
            (self.path / "logs").mkdir(exist_ok=True)
            write_atomically(self._settings_file, yaml.safe_dump(dict(settings), sort_keys=False))
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from None
        self.journal.open()

    def check_model(self, model: str) -> None:
        """Go on only with the same weights."""
        found = str(model_fingerprint(model))
        if self.played:
            try:
                old = self._model_file.read_text(encoding="utf-8")
            except (OSError, ValueError):
                old = ""
            if not old:
                self.differs(f"cannot go on, since {self._model_file} is missing or damaged")
            elif old != found:
                self.differs("were sampled from other weights, which were the model's then")
        write_atomically(self._model_file, found)

    def check_tasks(self, tasks: Mapping[str, Task], spec: EnvSpec) -> None:
        """Mix no episodes of an environment or of data that have changed since. `tasks` are those of the groups that
        are played, by their id."""
        change = first_change(self.played.values(), tasks, spec)
        if change is None:
            return
        episode, part = change
        if part is None:
            self.differs(f"posed other tasks (one was {episode.task.key})")
        else:
            self.differs(f"were played before the code of environment {part.id} changed, or its settings")

    def differs(self, how: str) -> None:
        """What is here cannot go on: begin anew where it may be overwritten, else raise `RunError`."""
        if not self._overwrite:
            raise RunError(f"{self.path} holds episodes that {how}: name another file, or begin anew with --overwrite")
        for path in (self.journal.path, self._settings_file, self._model_file):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        self.journal.path.write_bytes(b"")
        self.played = {}

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Whatever ends what is done in here leaves the episodes that had ended, or no folder where none had. Ctrl-C
        and a worker that failed, whose log is here, are told with what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            said = self.kept()
            self._leave()
            raise KeyboardInterrupt(said) from None
        except WorkerError as error:
            raise type(error)(f"{error}; {self.kept()}") from None
        except Exception:
            self._leave()
            raise

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Write the file, in place of this folder. Raises `DataError` where it cannot be, which says what is kept."""
        try:
            write_episodes(self._out, episodes)
        except DataError as error:
            raise DataError(f"{error}; {self.kept()}") from None
        self._remove()

    def kept(self) -> str:
        """What is here, and how to go on."""
        count = len(self.journal.played())
        if not count:
            return "no episode had ended"
        return f"{count} episodes are kept in {self.path}; the same command goes on from there"

    def _settings(self) -> Mapping[str, Any] | None:
        try:
            old = yaml.safe_load(self._settings_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return None
        return old if isinstance(old, Mapping) else None

    def _leave(self) -> None:
        """What was begun and came to nothing is not worth a folder."""
        with contextlib.suppress(OSError):
            if not self.journal.path.exists() or not self.journal.path.stat().st_size:
                self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """`key was 1 and is 2` for what differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        dot = f"{key}." if key else ""
        return [text for name in names for text in _differences(old.get(name), new.get(name), f"{dot}{name}")]
    return [] if old == new else [f"{key} was {old!r:.60} and is {new!r:.60}"]
