"""REINFORCE++-baseline: the group's mean reward is the baseline, and the spread is the whole batch's, not the group's.

Source: J. Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization"
(2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from envgym.learner import LearnerConfig

from .baseline import centred
from .kl import SquaredKL
from .monte_carlo import MonteCarlo
from .normalisation import Scope
from .policy_gradient import PolicyGradientConfig


class ReinforcePlusPlusBaselineConfig(PolicyGradientConfig):
    """Settings of REINFORCE++-baseline."""

    advantage_norm: Scope = "batch"
    kl: SquaredKL = SquaredKL()


class ReinforcePlusPlusBaseline(MonteCarlo):
    """REINFORCE++ with the group's mean reward taken off first."""

    Config: ClassVar[type[LearnerConfig]] = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig
    min_group_size: ClassVar[int] = 2

    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> list[float]:
        return centred(values, rewards)
