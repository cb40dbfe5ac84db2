"""GRPO: an episode's advantage is its reward, standardised within its group.

Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from .advantages import mean_of
from .policy_gradient import Aggregation, CriticFreeLearner, PolicyGradientConfig

HUGE = 2.0**1000
"""Rewards of a larger magnitude are first divided by this. Division by a power of two is exact."""


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    aggregation: Aggregation = "sequence"
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it."""


class GRPO(CriticFreeLearner):
    """Group relative policy optimisation."""

    Config = GRPOConfig
    config: GRPOConfig
    min_group_size = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return standardize(rewards, self.config.advantage_eps)


def standardize(rewards: Sequence[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps), n >= 2; exactly 0 if all rewards are equal. The standard deviation is the unbiased
    one."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    if max(map(abs, rewards)) > HUGE:  # differences and their norm could overflow
        return standardize([reward / HUGE for reward in rewards], eps / HUGE)
    mean = mean_of(rewards)
    # `hypot`, because squares of very large or very small rewards would overflow or underflow.
    std = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)
    return [(reward - mean) / (std + eps) for reward in rewards]
