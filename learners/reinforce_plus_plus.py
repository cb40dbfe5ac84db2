"""REINFORCE++: PPO's loss without a critic; returns are normalised over the whole rollout batch.

Source: J. Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"
(2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from envgym.learner import LearnerConfig

from .credit import Credit
from .kl import RewardKL
from .monte_carlo import MonteCarlo
from .normalisation import Scope
from .policy_gradient import PolicyGradientConfig


class ReinforcePlusPlusConfig(PolicyGradientConfig):
    """Settings of REINFORCE++."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()


class ReinforcePlusPlus(MonteCarlo):
    """REINFORCE with PPO's clip and advantages normalised over the batch."""

    Config: ClassVar[type[LearnerConfig]] = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return list(values)
