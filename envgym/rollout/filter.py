"""Dynamic filtering: which groups of finished episodes are not learned from."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from envgym.episodes.scores import is_flat
from envgym.errors import RunError
from envgym.settings import Settings
from envgym.types import Episode


class FilterConfig(Settings):
    """Dynamic filtering: groups that teach nothing are dropped, and other tasks are played in their place. What a
    replay plays is never dropped."""

    zero_variance: bool = False
    """Drop groups whose episodes all have one score."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Drop groups whose mean score is not above this."""
    max_score: float | None = Field(None, ge=0, le=1)
    """Drop groups whose mean score is not below this."""
    max_rounds: int = Field(10, ge=1)
    """Times a step plays tasks to get its groups. Then it learns from those it has, which is said."""

    @property
    def on(self) -> bool:
        return self.zero_variance or self.min_score is not None or self.max_score is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"no score is above min_score={self.min_score:g} and below max_score={self.max_score:g}")
        return self


def drop_reason(config: FilterConfig, members: Sequence[Episode]) -> str:
    """The reason, in one word, not to learn from a group of finished episodes; empty where there is none.

    Source: Q. Yu et al., "DAPO" (2025), section 3.2, which keeps 0 < accuracy < 1. Rewards stand in for scores where
    a member has none; where all have none, a range of scores cannot be asked for (`RunError`).
    """
    scores = [episode.score for episode in members if episode.score is not None]
    if config.zero_variance and is_flat(members):
        return "zero_variance"
    low, high = config.min_score, config.max_score
    if low is None and high is None:
        return ""
    if not scores:
        raise RunError(
            "rollout.filter.min_score and max_score go by scores, and the environment gives none (its rewards are not "
            'all in [0, 1]): let it give info["score"], or use rollout.filter.zero_variance alone'
        )
    mean = fmean(scores)
    outside = (low is not None and mean <= low) or (high is not None and mean >= high)
    return "score_range" if outside else ""
