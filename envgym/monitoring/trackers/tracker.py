"""What a tracker is told of a run, and what it does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Story:
    """What is known of a run before its first step.

    id      the same before and after a resume
    name    the run's, with the stage's behind it where there are several; `group` is the run's alone
    folder  the stage's; a tracker that writes files does so in a sub-folder of its own name
    config  every setting
    step    the last step that is done already: 0, or where a resumed run goes on from
    """

    id: str
    name: str
    group: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    step: int = 0


class Tracker(ABC):
    """One output. All calls come from one thread, and may block and raise."""

    @abstractmethod
    def open(self, story: Story) -> str:
        """Begin, or go on with the run of this id. Returns where people find it."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """A step's numbers, by name."""

    @abstractmethod
    def close(self, status: str) -> None:
        """The end: `completed`, `stopped` or `failed`. Returns when everything is written or sent."""
