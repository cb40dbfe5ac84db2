"""A note if no first answer has the form that the environment reads: then a score of zero looks like a
policy that is always wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from envgym.env import EnvSpec
from envgym.types import Episode

FIRST = 32
"""Episodes of an environment that are looked at."""
FEWEST = 8
"""Episodes that are enough for a verdict where there are no more."""


class FirstAnswers:
    """Says once per environment, through `note`, that none of its first episodes has an answer in the form asked for:
    each reports the metric `answered` = 0."""

    def __init__(self, spec: EnvSpec) -> None:
        self.note: Callable[[str], None] | None = None
        self._spec = spec
        self._missing = Counter[EnvSpec]()
        self._decided: set[EnvSpec] = set()

    def add(self, episode: Episode) -> None:
        spec = self._spec.spec_for(episode.task)
        if self.note is None or spec in self._decided or "answered" not in episode.metrics:
            return
        self._missing[spec] += 1
        if episode.metrics["answered"]:
            self._decided.add(spec)
        elif self._missing[spec] == FIRST:
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
