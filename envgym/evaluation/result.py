"""What evaluated episodes amount to: a mean with its interval, and what was left out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envgym.types import Group, Status

from .statistics import Mean, clustered_mean


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`mean` is over the tasks that have a score; failed episodes are counted in `failures`, never as zeros."""

    mean: Mean
    n_episodes: int
    truncated: int
    failures: dict[str, int]
    unscored: int
    sampled_tokens: int

    @classmethod
    def of(cls, groups: Sequence[Group]) -> EvalResult:
        episodes = [episode for group in groups for episode in group.episodes]
        finished = [episode for episode in episodes if not episode.failed]
        scores = {
            group.id: [episode.score for episode in group.episodes if not episode.failed and episode.score is not None]
            for group in groups
        }
        return cls(
            mean=clustered_mean(scores),
            n_episodes=len(episodes),
            truncated=sum(episode.outcome.status is Status.TRUNCATED for episode in finished),
            failures=dict(Counter(episode.outcome.reason for episode in episodes if episode.failed)),
            unscored=sum(episode.score is None for episode in finished),
            sampled_tokens=sum(row.n_action_tokens for episode in finished for row in episode.rows),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.mean.as_dict(),
            "n_episodes": self.n_episodes,
            "truncated": self.truncated,
            "failures": self.failures,
            "unscored": self.unscored,
            "tokens": self.sampled_tokens,
        }
