"""Dynamic filtering: dropping groups of finished episodes that give no gradient."""

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
    """Dynamic filtering: groups that give no gradient are dropped, and other tasks are rolled out instead. Replayed
    groups are never dropped."""

    zero_variance: bool = False
    """Drop groups whose episodes all have the same score."""
    min_score: float | None = Field(None, ge=0, le=1)
    """Drop groups with a mean score at or below this."""
    max_score: float | None = Field(None, ge=0, le=1)
    """Drop groups with a mean score at or above this."""
    max_rounds: int = Field(10, ge=1)
    """Maximum rollout rounds of a training step. After them the step trains on the groups it has, with an alert."""

    @property
    def is_on(self) -> bool:
        return self.zero_variance or self.min_score is not None or self.max_score is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_score is not None and self.max_score is not None and self.min_score >= self.max_score:
            raise ValueError(f"no score is above min_score={self.min_score:g} and below max_score={self.max_score:g}")
        return self


def drop_reason(config: FilterConfig, members: Sequence[Episode]) -> str:
    """The reason to drop a group of finished episodes, in one word; empty if the group stays.

    Source: Q. Yu et al., "DAPO" (2025), section 3.2, which keeps 0 < accuracy < 1. If a member has no score,
    `zero_variance` compares rewards. Raises `RunError` for a score range if no member has a score.
    """
    scores = [episode.score for episode in members if episode.score is not None]
    if config.zero_variance and is_flat(members):
        return "zero_variance"
    low, high = config.min_score, config.max_score
    if low is None and high is None:
        return ""
    if not scores:
        raise RunError(
            "rollout.filter.min_score and max_score need scores, and the environment gives none (its rewards are not "
            'all in [0, 1]): let it give info["score"], or use rollout.filter.zero_variance alone'
        )
    mean = fmean(scores)
    is_outside = (low is not None and mean <= low) or (high is not None and mean >= high)
    return "score_range" if is_outside else ""
