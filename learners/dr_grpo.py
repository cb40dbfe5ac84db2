"""Dr. GRPO: GRPO without its biases, the division by the group's standard deviation and by each response's length.

Source: Z. Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025), section 3.2. The loss is
divided by a constant length, not by the responses'.
"""

from __future__ import annotations

from collections.abc import Sequence

from .advantages import mean_of
from .policy_gradient import Aggregation, CriticFreeLearner, PolicyGradientConfig


class DrGRPOConfig(PolicyGradientConfig):
    """Settings of Dr. GRPO. Set `constant_length` to the token budget of a response."""

    aggregation: Aggregation = "constant"


class DrGRPO(CriticFreeLearner):
    """GRPO done right."""

    Config = DrGRPOConfig
    config: DrGRPOConfig
    min_group_size = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = mean_of(rewards)
        return [reward - mean for reward in rewards]
