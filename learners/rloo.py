"""RLOO: an episode's baseline is the mean reward of the others of its group.

Source: A. Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs" (2024), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from envgym.learner import LearnerConfig

from .baseline import mean_of
from .kl import RewardKL
from .monte_carlo import MonteCarlo
from .policy_gradient import PolicyGradientConfig


class RLOOConfig(PolicyGradientConfig):
    """Settings of RLOO."""

    kl: RewardKL = RewardKL()


class RLOO(MonteCarlo):
    """REINFORCE leave-one-out."""

    Config: ClassVar[type[LearnerConfig]] = RLOOConfig
    config: RLOOConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return left_one_out(values, rewards)


def left_one_out(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """v_i - mean of the rewards other than the i-th, n >= 2."""
    return [value - mean_of([*rewards[:i], *rewards[i + 1 :]]) for i, value in enumerate(values)]
