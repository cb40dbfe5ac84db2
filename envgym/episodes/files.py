"""Files of episodes: JSON lines or Parquet, by the file's suffix. The journal gets one line of JSON per ended episode,
so that a kill loses no episode that has ended."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from envgym.disk import regular_file, replacement_file
from envgym.errors import ConfigError, DataError, RunError, missing_package, reported_as
from envgym.images import ImageFolder, images_of
from envgym.types import Episode

from .record import from_record, read_rollouts, to_record, write_rollouts

EpisodeKey = tuple[str, int]
"""Group id and member number of an episode."""


class Journal:
    """A file of episodes. The first line of a key is the episode as it ended; a later line is the same episode after
    the judging of its group.

    Raises `DataError` for a file that cannot be read or written, or that holds anything but episodes.
    """

    def __init__(self, path: Path, images: ImageFolder | None = None) -> None:
        """`images` are those of its episodes, by default in the folder that `images_of` finds."""
        self.path = path
        self.images = images

    def originals(self) -> dict[EpisodeKey, Episode]:
        """The episodes before the judging of their groups, in the order in which they ended."""
        episodes: dict[EpisodeKey, Episode] = {}
        for episode in self._read():
            episodes.setdefault((episode.group_id, episode.member), episode)
        return episodes

    def latest(self) -> dict[EpisodeKey, Episode]:
        """The episodes after the judging of their groups, in the order in which they ended."""
        return {(episode.group_id, episode.member): episode for episode in self._read()}

    def episodes(self) -> list[Episode]:
        """Like `latest`, for a file that may be joined from several, with repeated keys: an episode replaces an earlier
        one of its key only if both are the same conversation."""
        episodes: list[Episode] = []
        positions: dict[EpisodeKey, int] = {}
        for episode in self._read():
            key = (episode.group_id, episode.member)
            if key in positions and _identity(episodes[positions[key]]) == _identity(episode):
                episodes[positions[key]] = episode
            else:
                positions[key] = len(episodes)
                episodes.append(episode)
        return episodes

    def open(self) -> None:
        """Prepare for writing: create the file, and complete or truncate a last line that a kill interrupted."""
        with reported_as(DataError, f"{self.path} cannot be written"):
            self.path.touch()
            content = self.path.read_bytes()
            end = content.rfind(b"\n") + 1
            if _is_json(content[end:]):
                with self.path.open("ab") as file:
                    file.write(b"\n")
            else:
                os.truncate(self.path, end)

    def write(self, episode: Episode) -> None:
        """Append an episode."""
        line, advice = episode_line(episode), "the episodes before this one are saved there"
        with (
            reported_as(DataError, f"{self.path} cannot be written", advice),
            self.path.open("a", encoding="utf-8") as file,
        ):
            file.write(line)

    def _read(self) -> Iterator[Episode]:
        if not self.path.exists():
            return
        number, images = 0, self.images or images_of(self.path)
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith("\n") and not _is_json(line):
                        return  # truncated by a kill
                    try:
                        episode = from_record(json.loads(line), images.locate)
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        problem = f"this is not an episode ({type(error).__name__}: {error})"
                        raise DataError(f"{self.path}, line {number}: {problem}") from None
                    yield episode
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}, line {number + 1}: it cannot be read ({error})") from None


def episode_line(episode: Episode) -> str:
    """The episode as a line of JSON. Values without a JSON type (a date in a task's fields) are written as text."""
    return json.dumps(to_record(episode), default=str) + "\n"


def _identity(episode: Episode) -> tuple[object, ...]:
    return episode.id, episode.task.key, episode.seconds, episode.messages


def _is_json(line: str | bytes) -> bool:
    """True if a last line lacks only its newline, as some editors write it."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


SUFFIXES = (".jsonl", ".parquet")


def read_episodes(path: Path) -> list[Episode]:
    """Read the episodes of a file (.jsonl, .parquet), a folder of such files (a run's `rollouts/`, or the run's own
    folder), or the folder of an evaluation. Files are sorted by name; their episodes stay in order.

    Raises `DataError` for anything else, and if there are no episodes.
    """
    episodes = [episode for file in _files(path) for episode in _read_file(file)]
    if not episodes:
        raise DataError(f"{path} holds no episodes")
    return episodes


def holds_episodes(path: Path) -> bool:
    """True if `read_episodes` would find episodes there."""
    try:
        return bool(read_episodes(path))
    except (DataError, RunError):
        return False


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"there is no file {path}")
    if not path.is_dir():
        with reported_as(DataError, f"{path} cannot be read"):
            return [regular_file(path)]
    if (path / "episodes.jsonl").is_file():
        return [path / "episodes.jsonl"]
    if (path / "rollouts").is_dir():
        path = path / "rollouts"
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"folder {path} holds no files of episodes ({', '.join(SUFFIXES)})")
    return files


def _read_file(path: Path) -> list[Episode]:
    if path.suffix == ".parquet":
        return read_rollouts(path)
    if path.suffix == ".jsonl":
        return Journal(path).episodes()
    raise DataError(f"{path}: episodes are read from files that end with {' or '.join(SUFFIXES)}")


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise an error if `write_episodes` could not write `path`, so that it comes before hours of work. Creates the
    parent folder."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--out {path}: episodes are written to a file that ends with {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise missing_package("pyarrow", "train", f"writing {path}")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder: name a file")
    if path.exists() and not overwrite:
        raise RunError(f"{path} exists: name another file, or replace it with --overwrite")
    probe = path.with_name(path.name + ".tmp")
    with reported_as(DataError, f"--out {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def write_episodes(path: Path, episodes: Sequence[Episode]) -> None:
    """Write the episodes to a .jsonl or .parquet file, in one rename. Raises `DataError` on failure; an existing file
    then stays unchanged."""
    with reported_as(DataError, f"{path} cannot be written"):
        if path.suffix == ".parquet":
            write_rollouts(path, episodes)
            return
        with replacement_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(episode_line(episode) for episode in episodes)
