"""The running step's episodes, kept as they end, so that a run that is killed in a long step goes on in its middle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from envgym.episodes.journal import EpisodeKey, Journal
from envgym.hashing import task_hash
from envgym.rollout.runner import group_ids
from envgym.types import Episode, Task


class UnfinishedStep:
    """Writes the episodes of a step down every `seconds`, so that a step that takes less costs nothing.

    They count for the step after the checkpoint that a run goes on from, whose weights have sampled them, and for no
    other. None: nothing is kept, as a deterministic run would not be the same with some of a wave's episodes gone.
    """

    def __init__(self, path: Path, seconds: float | None) -> None:
        self._journal, self._seconds = Journal(path), seconds
        self._kept: dict[EpisodeKey, Episode] = {}
        self._waiting: list[Episode] = []
        self._written = time.monotonic()
        if seconds is not None and path.exists():
            self._kept = {key: episode for key, episode in self._journal.played().items() if not episode.failed}
            self._journal.open()

    def begin(self, step: int) -> None:
        """Forget what was kept of any other step."""
        if not any(group.startswith(purpose(step)) for group, _ in self._kept):
            self.clear()
        self._written = time.monotonic()

    def kept(self, name: str, tasks: Sequence[Task]) -> Mapping[EpisodeKey, Episode]:
        """The episodes of these tasks, played as `name`, that need not be played again."""
        hashes = {group: task_hash(task) for group, task in group_ids(name, tasks).items()} if self._kept else {}
        return {key: old for key, old in self._kept.items() if old.fingerprints["task"] == hashes.get(key[0])}

    def add(self, episode: Episode) -> None:
        """Take an episode that has ended."""
        if self._seconds is None:
            return
        self._waiting.append(episode)
        if time.monotonic() - self._written >= self._seconds:
            self.write()

    def write(self) -> None:
        """Write down what has ended since the last time."""
        for waiting in self._waiting:
            self._journal.write(waiting)
        self._waiting, self._written = [], time.monotonic()

    def clear(self) -> None:
        """Forget everything: the step is done."""
        self._kept, self._waiting = {}, []
        self._journal.path.unlink(missing_ok=True)


def purpose(step: int) -> str:
    """Beginning of the names that a step's groups have, before the number of their round."""
    return f"step-{step:06d}-"
