"""Files of episodes: JSON lines or Parquet, by the file's suffix."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from envgym.disk import regular_file, replacement_file
from envgym.errors import ConfigError, DataError, RunError, missing_package, reported_as
from envgym.types import Episode

from .journal import Journal, episode_line
from .record import read_rollouts, write_rollouts

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
