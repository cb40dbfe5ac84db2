"""The running step's episodes, saved as they end, so that a run that is killed in a long step resumes within it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from envgym.episodes.journal import EpisodeKey, Journal
from envgym.hashing import task_hash
from envgym.rollout.runner import group_ids
from envgym.types import Episode, Task


class UnfinishedStep:
    """Writes a step's finished episodes every `seconds`, so that a shorter step costs nothing.

    A resumed run uses them for the step after its checkpoint, whose weights sampled them, and for no other. With None
    nothing is saved: a deterministic run with part of a lockstep batch would not be the same.
    """

    def __init__(self, path: Path, seconds: float | None) -> None:
        self._journal, self._seconds = Journal(path), seconds
        self._saved: dict[EpisodeKey, Episode] = {}
        self._unwritten: list[Episode] = []
        self._last_write = time.monotonic()
        if seconds is not None and path.exists():
            self._saved = {key: episode for key, episode in self._journal.originals().items() if episode.is_counted}
            self._journal.open()

    def start_step(self, step: int) -> None:
        """Discard the saved episodes of any other step."""
        if not any(group.startswith(purpose_prefix(step)) for group, _ in self._saved):
            self.clear()
        self._last_write = time.monotonic()

    def finished_episodes(self, purpose: str, tasks: Sequence[Task]) -> Mapping[EpisodeKey, Episode]:
        """The saved episodes of these tasks in the sampling plan `purpose`."""
        hashes = {group: task_hash(task) for group, task in group_ids(purpose, tasks).items()} if self._saved else {}
        return {key: old for key, old in self._saved.items() if old.fingerprints["task"] == hashes.get(key[0])}

    def add(self, episode: Episode) -> None:
        """Add a finished episode; write all if it is time."""
        if self._seconds is None:
            return
        self._unwritten.append(episode)
        if time.monotonic() - self._last_write >= self._seconds:
            self.write()

    def write(self) -> None:
        """Write the episodes that were added since the last write."""
        for episode in self._unwritten:
            self._journal.write(episode)
        self._unwritten, self._last_write = [], time.monotonic()

    def clear(self) -> None:
        """Discard all episodes and the file."""
        self._saved, self._unwritten = {}, []
        self._journal.path.unlink(missing_ok=True)


def purpose_prefix(step: int) -> str:
    """Prefix of the purposes of a training step's sampling plans; the number of the round follows."""
    return f"step-{step:06d}-"
