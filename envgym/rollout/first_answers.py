"""A note for runs in which no first answer has the form that the environment reads: a score of zero would look like a
policy that is always wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from envgym.env import EnvSpec
from envgym.types import Episode, Task

FIRST = 32
"""Number of an environment's episodes that are looked at: the first to start, since the first to end have the shortest
answers."""
FEWEST = 8
"""Number of episodes that is enough for a verdict if the environment has no more."""


class FirstAnswers:
    """Notes once per environment, through `note`, that none of its first episodes has an answer in the form asked for:
    each of them reports the metric `answered` = 0."""

    def __init__(self, spec: EnvSpec) -> None:
        self.note: Callable[[str], None] | None = None
        self.is_over = False
        """True once all environments have had their first episodes: none is counted any more."""
        self._spec = spec
        self._n_started = Counter[EnvSpec]()
        self._values: dict[EnvSpec, list[float | None]] = defaultdict(list)
        """The metric `answered` of the first episodes."""
        self._noted: set[EnvSpec] = set()

    def start(self, task: Task) -> bool:
        """Count the start of an episode of `task`. True if it is among the first; then `add` is called at its end."""
        spec = self._spec.spec_for(task)
        self._n_started[spec] += 1
        return self._n_started[spec] <= FIRST

    def add(self, episode: Episode) -> None:
        spec = self._spec.spec_for(episode.task)
        self._values[spec].append(episode.metrics.get("answered"))
        if len(self._values[spec]) == FIRST:
            self._decide(spec)
            self.is_over = all(len(self._values[part]) == FIRST for part in self._spec.parts())

    def conclude(self) -> None:
        """Decide for environments with fewer episodes, since no more will start."""
        for spec, values in self._values.items():
            if len(values) < FIRST:
                self._decide(spec)

    def _decide(self, spec: EnvSpec) -> None:
        values = self._values[spec]
        n_missing = 0 if any(values) or spec in self._noted else values.count(0)
        if n_missing >= FEWEST and self.note is not None and spec.unanswered:
            self._noted.add(spec)
            self.note(f"no answer in the first {n_missing} episodes of {spec.id}: {spec.unanswered}")
