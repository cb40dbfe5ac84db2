"""The policy's loss of each token, by its name in `learner.policy_loss`. Settings are checked where torch is not
installed, so nothing here imports it.

All tensors are [B, T] unless a docstring says otherwise. `log_ratio` is log pi - log pi_old in nats; it is bounded at
20 where it is exponentiated, so that one token cannot overflow the loss.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from envgym.loading import load_class, target_of_name

if TYPE_CHECKING:
    from torch import Tensor

    from .policy_gradient import PolicyGradientConfig

    Losses = tuple[Tensor, Tensor, Tensor]
    """(losses, clipped_low, clipped_high), [B, T] each, the last two bool."""


class PolicyLoss(ABC):
    """Subclass it and write `losses`. A package gives it a name by an entry point of the group
    `envgym.policy_losses`."""

    needs_old_logprobs: ClassVar[bool] = False
    """True if the old policy must be the trainer's at the start of the update, not the sampler's."""
    has_ratio: ClassVar[bool] = True
    """False without a ratio to the old policy: then samples of older policies need a `correction`."""
    has_dual_clip: ClassVar[bool] = False
    """True if it has the setting `dual_clip`."""
    of_episode: ClassVar[bool] = False
    """True if `log_ratio` is the mean over the whole episode, at each of its tokens."""

    @abstractmethod
    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        """The loss of each token, and masks of the tokens whose ratio was clipped from below and from above."""


@functools.cache
def policy_loss_of(name: str) -> PolicyLoss:
    """The policy loss of a name: an id, `file.py:Name` or `package.module:Name`. Raises `NameNotFound` for an unknown
    one, and `ConfigError` for one that cannot be used."""
    loss_class = load_class(target_of_name("envgym.policy_losses", name, "policy loss"), (PolicyLoss,), "policy loss")
    loss: PolicyLoss = loss_class()
    return loss


class ClippedRatio(PolicyLoss):
    """PPO's clipped surrogate, negated: -min(r A, clip(r, 1 - low, 1 + high) A), and with a dual clip c for negative
    advantages -max(that, c A).

    Sources: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; separate bounds as in DAPO
    (Q. Yu et al., 2025); dual clip D. Ye et al., "Mastering Complex Control in MOBA Games" (2020).
    """

    has_dual_clip = True

    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        ratio = log_ratio.clamp(-20.0, 20.0).exp()
        unclipped = -advantages * ratio
        bounded = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        losses, clipped = unclipped.maximum(bounded), bounded > unclipped
        if config.dual_clip is not None:
            losses = losses.minimum(-config.dual_clip * advantages).where(advantages < 0, losses)
        return losses, clipped & (ratio < 1), clipped & (ratio > 1)


class SequenceRatio(ClippedRatio):
    """GSPO: PPO's loss with the ratio of the whole episode. Source: C. Zheng et al., "Group Sequence Policy
    Optimization" (2025), the variant GSPO-token."""

    needs_old_logprobs = True
    of_episode = True


class BoundedWeight(PolicyLoss):
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps its gradient, and only its weight is bounded.

    Source: MiniMax, "MiniMax-M1" (2025).
    """

    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        low, high = 1 - config.clip_low, 1 + config.clip_high
        ratio = log_ratio.detach().clamp(-20.0, 20.0).exp()
        return -ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high


class WithoutRatio(PolicyLoss):
    """REINFORCE: -A log pi. Source: R. Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist
    Reinforcement Learning" (1992)."""

    has_ratio = False

    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        unclipped = advantages.new_zeros(advantages.shape, dtype=bool)
        return -advantages * logprobs, unclipped, unclipped
