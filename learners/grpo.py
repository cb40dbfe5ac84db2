"""GRPO: an episode's advantage is its reward, standardised within its group.

Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from .advantages import mean_of
from .policy_gradient import Aggregation, TreeConfig, TreeLearner

HUGE = 2.0**1000
"""Rewards of a larger magnitude are first divided by this. Division by a power of two is exact."""


class GRPOConfig(TreeConfig):
    """Settings of GRPO."""

    aggregation: Aggregation = "sequence"
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it."""


class GRPO(TreeLearner):
    """Group relative policy optimisation."""

    Config = GRPOConfig
    config: GRPOConfig
    min_group_size = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return standardize(rewards, self.config.advantage_eps)

    def sibling_advantages(self, values: Sequence[float], returns: Sequence[float]) -> list[float]:
        return standardize(values, self.config.advantage_eps, returns)  # of two values the own deviation says nothing


def standardize(rewards: Sequence[float], eps: float, group: Sequence[float] = ()) -> list[float]:
    """(r - mean) / (std + eps), n >= 2; exactly 0 if all rewards are equal. The standard deviation is the unbiased one
    of the rewards, or of a `group`."""
    group = group or rewards
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    if max(map(abs, [*rewards, *group])) > HUGE:  # differences and their norm could overflow
        return standardize([reward / HUGE for reward in rewards], eps / HUGE, [reward / HUGE for reward in group])
    mean, center = mean_of(rewards), mean_of(group)
    # `hypot`, because squares of very large or very small rewards would overflow or underflow.
    std = math.hypot(*(reward - center for reward in group)) / math.sqrt(len(group) - 1)
    return [(reward - mean) / (std + eps) for reward in rewards]
