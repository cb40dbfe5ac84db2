"""GRPO: an episode's advantage is its reward, standardised within its group.

Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1. The standard deviation is the unbiased one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from envgym.learner import LearnerConfig

from .baseline import mean_of
from .monte_carlo import MonteCarlo
from .policy_gradient import Aggregation, PolicyGradientConfig

HUGE = 2.0**1000
"""Size of rewards above which they are first divided by it. A power of two loses no digit."""


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    aggregation: Aggregation = "sequence"
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it."""


class GRPO(MonteCarlo):
    """Group relative policy optimisation."""

    Config: ClassVar[type[LearnerConfig]] = GRPOConfig
    config: GRPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return standardised(values, rewards, self.config.advantage_eps)


def standardised(values: Sequence[float], rewards: Sequence[float], eps: float) -> list[float]:
    """(v - mean) / (std + eps) with the mean and standard deviation of a group's rewards, n >= 2; exactly 0 where all
    of these are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(values)
    if max(map(abs, [*values, *rewards])) > HUGE:  # differences of these may be no floats, nor their squares' root
        return standardised([value / HUGE for value in values], [reward / HUGE for reward in rewards], eps / HUGE)
    mean = mean_of(rewards)
    # `hypot`, because squares of very large or very small rewards would overflow or vanish.
    std = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)
    return [(value - mean) / (std + eps) for value in values]
