"""Episodes as they end, a line of JSON each, so that a kill at any moment loses none that had ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .episode_record import from_record, to_record
from .errors import DataError
from .types import Episode

Place = tuple[str, int]
"""An episode's group and its member in it."""


class Journal:
    """A file of episodes. The first line of a place is the episode as it was played, a later one the same episode
    after its group was judged together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def played(self) -> dict[Place, Episode]:
        """The episodes as they were played, in the order in which they ended."""
        found: dict[Place, Episode] = {}
        for episode in self._read():
            found.setdefault((episode.group, episode.member), episode)
        return found

    def judged(self) -> dict[Place, Episode]:
        """The episodes with the last that was said of them."""
        return {(episode.group, episode.member): episode for episode in self._read()}

    def open(self) -> None:
        """Make ready to write: what a kill left of a last line is cut off."""
        self.path.touch()
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def write(self, episode: Episode) -> None:
        """Append an episode. What JSON does not know (a date in a task's fields) is written as text."""
        line = json.dumps(to_record(episode), default=str) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _read(self) -> Iterator[Episode]:
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return  # cut short by a kill
                yield _episode(line, self.path, number)


def _episode(line: str, path: Path, number: int) -> Episode:
    try:
        record: Any = json.loads(line)
        return from_record(record)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}, line {number}: this is not an episode ({type(error).__name__}: {error})") from None
