"""RLOO: an episode's baseline is the mean reward of the other episodes of its group.

Source: A. Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
LLMs" (2024), section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from .advantages import mean_of
from .policy_gradient import RewardKL, TreeConfig, TreeLearner


class RLOOConfig(TreeConfig):
    """Settings of RLOO."""

    kl: RewardKL = RewardKL()


class RLOO(TreeLearner):
    """REINFORCE leave-one-out."""

    Config = RLOOConfig
    config: RLOOConfig
    min_group_size = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [reward - mean_of([*rewards[:i], *rewards[i + 1 :]]) for i, reward in enumerate(rewards)]
