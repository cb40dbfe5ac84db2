"""REINFORCE++: PPO's loss without a critic, on advantages that are normalised over the whole rollout batch.

Of two kinds: returns as they are, or with the group's mean reward as the baseline. Source: J. Hu et al., "REINFORCE++:
Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization" (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from envgym.learner import LearnerConfig

from .advantages import centred
from .policy_gradient import CriticFreeLearner
from .settings import Credit, PolicyGradientConfig, RewardKL, Scope, SquaredKL


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Settings of REINFORCE++."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()


class ReinforcePlusPlus(CriticFreeLearner):
    """REINFORCE with PPO's clip and advantages normalised over the batch."""

    Config: ClassVar[type[LearnerConfig]] = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return list(values)


class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
    """Settings of REINFORCE++-baseline."""

    advantage_norm: Scope = "batch"
    kl: SquaredKL = SquaredKL()


class ReinforcePlusPlusBaseline(CriticFreeLearner):
    """REINFORCE++ with the group's mean reward taken off first; the spread is the whole batch's, not the group's."""

    Config: ClassVar[type[LearnerConfig]] = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return centred(values, rewards)
