"""GRPO: an episode's advantage is its reward, standardised within its group.

Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1. The standard deviation is the unbiased one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from envgym.learner import LearnerConfig

from .policy_gradient import PolicyGradient, PolicyGradientConfig


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it."""


class GRPO(PolicyGradient):
    """Group relative policy optimisation."""

    Config: ClassVar[type[LearnerConfig]] = GRPOConfig
    config: GRPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return standardised(rewards, self.config.advantage_eps)


def standardised(rewards: Sequence[float], eps: float) -> list[float]:
    """(r - mean) / (std + eps) of one group, n >= 2; exactly 0 where all rewards are equal."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    # `hypot`, because squares of very large or very small rewards would overflow or vanish.
    std = math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)
    return [(reward - mean) / (std + eps) for reward in rewards]
