"""REINFORCE++: PPO's loss without a critic, on advantages that are normalised over the whole rollout batch.

Two variants: plain returns, or rewards minus the group's mean reward. Source: J. Hu et al., "REINFORCE++: Stabilizing
Critic-Free Policy Optimization with Global Advantage Normalization" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence

from .advantages import mean_of
from .policy_gradient import Credit, CriticFreeLearner, PolicyGradientConfig, RewardKL, Scope, SquaredKL


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Settings of REINFORCE++."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()


class ReinforcePlusPlus(CriticFreeLearner):
    """REINFORCE with PPO's clip and advantages normalised over the batch."""

    Config = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return list(rewards)


class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
    """Settings of REINFORCE++-baseline."""

    advantage_norm: Scope = "batch"
    kl: SquaredKL = SquaredKL()


class ReinforcePlusPlusBaseline(CriticFreeLearner):
    """REINFORCE++ on rewards minus their group's mean; the standard deviation is the batch's, not the group's."""

    Config = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig
    min_group_size = 2

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = mean_of(rewards)
        return [reward - mean for reward in rewards]
