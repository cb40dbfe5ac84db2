"""Policy losses per token: how a ratio to the old policy and an advantage become a loss.

All tensors are [B, T]. `log_ratio` is log pi - log pi_old in nats. Each function returns the losses and where the
lower and where the upper bound held the ratio (bool).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .correction import episode_means

if TYPE_CHECKING:
    import torch

    Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce"]


def clipped_policy_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Loss:
    """PPO's clipped surrogate, negated: -min(r A, clip(r, 1 - low, 1 + high) A), and with a dual clip c for negative
    advantages -max(that, c A).

    Sources: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; separate bounds as in DAPO
    (Q. Yu et al., 2025); dual clip D. Ye et al., "Mastering Complex Control in MOBA Games" (2020). The
    log-ratio is bounded at 20 so that its exponential stays finite.
    """
    import torch

    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses, clipped & (ratio < 1), clipped & (ratio > 1)


def sequence_log_ratio(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, weights: torch.Tensor, episodes: torch.Tensor
) -> torch.Tensor:
    """GSPO's log-ratio: the mean of the tokens' over the whole episode, at each of its tokens.

    Its gradient at a token is that of the token's own log-probability, so that advantages may differ from token to
    token; where they do not, the gradient is the sequence ratio's. Source: C. Zheng et al., "Group Sequence Policy
    Optimization" (2025), the variant GSPO-token.
    """
    means = episode_means(log_ratio.detach(), weights, episodes)
    return means[:, None] + logprobs - logprobs.detach()


def cispo_loss(
    log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> Loss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: no token loses its gradient, only its weight is bounded.

    Source: MiniMax, "MiniMax-M1" (2025).
    """
    ratio = log_ratio.detach().clamp(-20.0, 20.0).exp()
    losses = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs
    return losses, ratio < 1 - clip_low, ratio > 1 + clip_high


def reinforce_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> Loss:
    """-A log pi, whatever sampled it. Source: R. Williams, "Simple Statistical Gradient-Following Algorithms for
    Connectionist Reinforcement Learning" (1992)."""
    import torch

    never = torch.zeros_like(advantages, dtype=torch.bool)
    return -advantages * logprobs, never, never
