"""GRPO: an episode's advantage is its reward, standardised within its group.

Source: Z. Shao et al., "DeepSeekMath" (2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from envgym.learner import LearnerConfig

from .advantages import standardize
from .policy_gradient import CriticFreeLearner
from .settings import Aggregation, PolicyGradientConfig


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    aggregation: Aggregation = "sequence"
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the group's standard deviation before dividing by it."""


class GRPO(CriticFreeLearner):
    """Group relative policy optimisation."""

    Config: ClassVar[type[LearnerConfig]] = GRPOConfig
    config: GRPOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return standardize(rewards, self.config.advantage_eps)
