"""A note if no first answer has the form that the environment reads: then a score of zero looks like a
policy that is always wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
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
        self._n_started = Counter[EnvSpec]()
        self._values: dict[EnvSpec, list[float | None]] = defaultdict(list)
        """The metric `answered` of the first episodes."""
        self._noted: set[EnvSpec] = set()

    def start(self, task: Task) -> bool:
        """True if the episode of this task that starts now is among the first: then `add` gets it when it has ended."""
        spec = self._spec.spec_for(task)
        self._n_started[spec] += 1
        return self._n_started[spec] <= FIRST

    def add(self, episode: Episode) -> None:
        spec = self._spec.spec_for(episode.task)
        self._values[spec].append(episode.metrics.get("answered"))
        if len(self._values[spec]) == FIRST:
            self._decide(spec)

    def conclude(self) -> None:
        """Decide for environments with fewer episodes: there are no more."""
        for spec, values in self._values.items():
            if len(values) < FIRST:
                self._decide(spec)

    def _decide(self, spec: EnvSpec) -> None:
        values = self._values[spec]
        n_missing = 0 if any(values) or spec in self._noted else values.count(0)
        if n_missing >= FEWEST and self.note is not None and spec.unanswered:
            self._noted.add(spec)
            self.note(f"no answer in the first {n_missing} episodes of {spec.id}: {spec.unanswered}")
