"""Episodes as they end, a line of JSON each, so that a kill at any moment loses none that had ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from envgym.errors import DataError, reported_as
from envgym.types import Episode

from .record import from_record, to_record

EpisodeKey = tuple[str, int]
"""An episode's group and its member in it."""


class Journal:
    """A file of episodes. The first line of a key is the episode as it was played, a later one the same episode
    after its group was judged together.

    Raises `DataError` for a file that cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def played(self) -> dict[EpisodeKey, Episode]:
        """The episodes as they were played, in the order in which they ended."""
        found: dict[EpisodeKey, Episode] = {}
        for episode in self._read():
            found.setdefault((episode.group_id, episode.member), episode)
        return found

    def judged(self) -> dict[EpisodeKey, Episode]:
        """The episodes as they were judged last, in the same order."""
        return {(episode.group_id, episode.member): episode for episode in self._read()}

    def episodes(self) -> list[Episode]:
        """The same of a file that may have been joined from several, whose keys may be the same: an episode is the one
        before it, judged, where both are the same conversation."""
        found: list[Episode] = []
        last: dict[EpisodeKey, int] = {}
        for episode in self._read():
            key = (episode.group_id, episode.member)
            if key in last and _identity(found[last[key]]) == _identity(episode):
                found[last[key]] = episode
            else:
                last[key] = len(found)
                found.append(episode)
        return found

    def open(self) -> None:
        """Make ready to write: what a kill left of a last line is cut off."""
        with reported_as(DataError, f"{self.path} cannot be written"):
            self.path.touch()
            content = self.path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if _is_whole(content[whole:]):
                with self.path.open("ab") as file:
                    file.write(b"\n")
            else:
                os.truncate(self.path, whole)

    def write(self, episode: Episode) -> None:
        """Append an episode."""
        line, advice = episode_line(episode), "the episodes before this one are kept there"
        with (
            reported_as(DataError, f"{self.path} cannot be written", advice),
            self.path.open("a", encoding="utf-8") as file,
        ):
            file.write(line)

    def _read(self) -> Iterator[Episode]:
        if not self.path.exists():
            return
        number = 0
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith("\n") and not _is_whole(line):
                        return  # cut short by a kill
                    try:
                        episode = from_record(json.loads(line))
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        problem = f"this is not an episode ({type(error).__name__}: {error})"
                        raise DataError(f"{self.path}, line {number}: {problem}") from None
                    yield episode
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path}, line {number + 1}: it cannot be read ({error})") from None


def episode_line(episode: Episode) -> str:
    """The episode as a line of JSON. What JSON does not know (a date in a task's fields) is written as text."""
    return json.dumps(to_record(episode), default=str) + "\n"


def _identity(episode: Episode) -> tuple[object, ...]:
    return episode.id, episode.task.key, episode.seconds, episode.messages


def _is_whole(last: str | bytes) -> bool:
    """True where a last line lacks only its end, as editors leave it."""
    try:
        json.loads(last)
    except ValueError:
        return False
    return True
