"""A note if no first answer has the form that the environment reads: then a score of zero looks like a
policy that is always wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from envgym.env import EnvSpec
from envgym.types import Episode, Task

FIRST = 32
"""Episodes of an environment that are looked at: those that start first, since those that end first have the shortest
answers."""
FEWEST = 8
"""Episodes that are enough for a verdict where there are no more."""


class FirstAnswers:
    """Says once per environment, through `note`, that none of its first episodes has an answer in the form asked for:
    each reports the metric `answered` = 0."""

    def __init__(self, spec: EnvSpec) -> None:
        self.note: Callable[[str], None] | None = None
        self._spec = spec
        self._n_started, self._n_ended, self._missing = Counter[EnvSpec](), Counter[EnvSpec](), Counter[EnvSpec]()
        self._decided: set[EnvSpec] = set()

    def start(self, task: Task) -> bool:
        """True if the episode of this task that starts now is among the first: then `add` gets it when it has ended."""
        spec = self._spec.spec_for(task)
        self._n_started[spec] += 1
        return self._n_started[spec] <= FIRST

    def add(self, episode: Episode) -> None:
        spec = self._spec.spec_for(episode.task)
        if self.note is None or spec in self._decided:
            return
        self._n_ended[spec] += 1
        if episode.metrics.get("answered"):
            self._decided.add(spec)
            return
        self._missing[spec] += "answered" in episode.metrics
        if self._n_ended[spec] == FIRST and self._missing[spec] >= FEWEST:
            self._say(spec)

    def conclude(self) -> None:
        """Decide for environments with fewer episodes: there are no more."""
        for spec in [spec for spec, count in self._missing.items() if count >= FEWEST]:
            if spec not in self._decided:
                self._say(spec)

    def _say(self, spec: EnvSpec) -> None:
        self._decided.add(spec)
        if self.note is not None and spec.unanswered:
            self.note(f"no answer in the first {self._missing[spec]} episodes of {spec.id}: {spec.unanswered}")
