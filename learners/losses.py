"""Losses per token: the policy's, by its name in `learner.policy_loss` and with all terms; the critic's; the KL to a
reference, and the correction of the sampler's gap.

All tensors are [B, T] unless a docstring says otherwise. `log_ratio` is log pi - log pi_old in nats; it is bounded at
20 where it is exponentiated, so that one token cannot overflow the loss. The numbers at a masked or dropped token
may be NaN: every function decides with `where`, never with a product. torch is imported inside functions: settings are
checked where it is not installed.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, LossAndMetrics, MetricSums, Outputs, RowBatch
from envgym.loading import load_class, target_of_name

if TYPE_CHECKING:
    from torch import Tensor

    from .policy_gradient import CorrectionConfig, KLEstimator, PolicyGradientConfig

    Losses = tuple[Tensor, Tensor, Tensor]
    """(losses, clipped_low, clipped_high), [B, T] each, the last two bool."""

# ---------------------------------------------------------------------------------------------------------
# The policy's loss of each token


class PolicyLoss(ABC):
    """Subclass it and write `losses`. A package gives it a name by an entry point of the group
    `envgym.policy_losses`."""

    needs_old_logprobs: ClassVar[bool] = False
    """True if the old policy must be the trainer's at the start of the update, not the sampler's."""
    has_ratio: ClassVar[bool] = True
    """False without a ratio to the old policy: then samples of older policies need a `correction`."""
    has_dual_clip: ClassVar[bool] = False
    """True if it has the setting `dual_clip`."""
    is_linear: ClassVar[bool] = False
    """True if at the old policy its gradient is minus the advantage times that of log pi."""
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

    is_linear = has_dual_clip = True

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

    is_linear = True

    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        low, high = 1 - config.clip_low, 1 + config.clip_high
        ratio = log_ratio.detach().clamp(-20.0, 20.0).exp()
        return -ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high


class WithoutRatio(PolicyLoss):
    """REINFORCE: -A log pi. Source: R. Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist
    Reinforcement Learning" (1992)."""

    has_ratio, is_linear = False, True

    def losses(self, log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> Losses:
        unclipped = advantages.new_zeros(advantages.shape, dtype=bool)
        return -advantages * logprobs, unclipped, unclipped


# ---------------------------------------------------------------------------------------------------------
# The policy's loss with all terms


def actor_loss(outputs: Outputs, batch: RowBatch, config: PolicyGradientConfig) -> LossAndMetrics:
    """The weighted sum over the batch's tokens of the policy's loss, with correction, entropy bonus and KL if
    `config` sets them; and metrics to log."""
    import torch

    old = old_logprobs(outputs, batch, config)
    mask, weights = batch.loss_weights > 0, torch.ones_like(batch.loss_weights)
    metrics: MetricSums = {}
    if config.correction.kind != "none":
        counts, sampled = mask, batch.old_logprobs
        weights, mask = importance_weights(old, sampled, batch.loss_weights, batch.episodes, config.correction)
        n_counted, n_kept, weight_sum = torch.stack([counts.sum(), mask.sum(), weights.sum()]).tolist()
        dropped = (n_counted - n_kept, n_counted)
        metrics = {"correction/weight": (weight_sum, n_kept), "correction/dropped_share": dropped}

    def masked(values: Tensor) -> Tensor:
        # `where`, not a product with the mask: a NaN or infinity at a masked or dropped token must reach neither
        # the loss nor, through a derivative there, the gradient.
        return values.where(mask, 0.0)

    logprobs, old = masked(outputs.logprobs), masked(old)
    log_ratio = logprobs - old
    policy_loss = policy_loss_of(config.policy_loss)
    if policy_loss.of_episode:
        log_ratio = sequence_log_ratio(log_ratio, logprobs, masked(batch.loss_weights), batch.episodes)
    result = policy_loss.losses(log_ratio, logprobs, masked(batch.arrays["advantages"]), config)
    shapes = [list(getattr(part, "shape", ())) for part in (result if isinstance(result, tuple) else [result])]
    if shapes != [shape := list(log_ratio.shape)] * 3:
        raise Learner.wrong_return(policy_loss.losses, f"shapes {shapes}, not (losses, low, high) of {shape} each")
    losses, low, high = result
    losses = weights * losses
    entropy = masked(outputs.entropy)
    means = {"policy/entropy": entropy, "policy/clip_fraction_low": low, "policy/clip_fraction_high": high}
    if config.entropy_coef > 0:
        losses = losses - config.entropy_coef * entropy
    if config.kl.coef > 0:
        kl = kl_estimate(logprobs, masked(batch.arrays["reference"]), config.kl.estimator)
        means["policy/kl"] = kl
        if config.kl.applied_to == "loss":
            adaptive = "kl_coef" in batch.arrays
            losses = losses + (masked(batch.arrays["kl_coef"]) if adaptive else config.kl.coef) * kl
    total = (batch.loss_weights * losses).sum()
    summed, weight = torch.stack([total.detach(), batch.loss_weights.sum()]).tolist()
    return total, metrics | token_metrics(means, log_ratio, mask) | {"loss": (summed, weight)}


def old_logprobs(outputs: Outputs, batch: RowBatch, config: PolicyGradientConfig) -> Tensor:
    """The old policy's log-probabilities: the sampler's, or the trainer's at the start of the update."""
    if not config.recomputes:
        return batch.old_logprobs
    # A single optimizer step begins with the old policy's weights, so its own forward pass has them.
    return batch.arrays["actor"] if config.scores_actor else outputs.logprobs.detach()


def sequence_log_ratio(log_ratio: Tensor, logprobs: Tensor, weights: Tensor, episodes: Tensor) -> Tensor:
    """GSPO's log-ratio: the mean of the token log-ratios over the whole episode, at each of its tokens.

    Its gradient at a token is that of the token's log-probability, so that advantages may differ between tokens; if
    they are equal, the gradient is that of the sequence ratio. Source: C. Zheng et al., "Group Sequence Policy
    Optimization" (2025), the variant GSPO-token.
    """
    means = episode_means(log_ratio.detach(), weights, episodes)
    return means[:, None] + logprobs - logprobs.detach()


def episode_means(values: Tensor, weights: Tensor, episodes: Tensor) -> Tensor:
    """[B] the weighted mean of `values` [B, T] over all rows of each row's episode; 0 without weight.

    All rows of an episode must be in the batch. Infinities and NaN do not leave their episode.
    """
    same_episode = episodes[:, None] == episodes[None, :]
    totals, counted = (values * weights).sum(1), weights.sum(1)
    total, count = (sums[None, :].where(same_episode, 0.0).sum(1) for sums in (totals, counted))
    return (total / count.where(count > 0, 1.0)).where(count > 0, 0.0)


# ---------------------------------------------------------------------------------------------------------
# The sampler's gap, and the distance to a reference


def importance_weights(
    old: Tensor, sampled: Tensor, weights: Tensor, episodes: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """[B, T] the factor of each token's policy loss (no gradient), and [B, T] bool the mask of tokens to train on.

    old, sampled [B, T] nats: the trainer's log-probabilities at the start of the update, and the sampler's; weights
    [B, T], above 0 for tokens in the loss; episodes [B]. The factor is 0 at masked tokens.

    Sources: `tis` F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    `icepop` X. Zhao et al., "Small Leak Can Sink a Great Ship" (2025); the geometric mean that decides on sequences
    J. Liu et al., "When Speed Kills Stability" (2025).
    """
    counts = weights > 0
    log_weights = (old - sampled).detach().where(counts, 0.0)
    factors = log_weights.clamp(-20.0, 20.0).exp()
    mask = counts
    if config.kind == "icepop":
        mask = counts & (factors >= config.low) & (factors <= config.high)
    else:
        factors = factors.clamp(max=config.high)
    if config.kind == "seq_mask_tis":
        means = episode_means(log_weights, weights.where(counts, 0.0), episodes).exp()
        mask = counts & ((means >= config.low) & (means <= config.high))[:, None]
    return factors.where(mask, 0.0), mask


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate, in nats, same shape as the inputs.

    With l = log pi - log pi_ref: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l, where -l is bounded at 20 so that
    one token cannot overflow the loss. Past the bound the exponential keeps its gradient: a plain clamp would zero it
    and leave the gradient 1 of l, which pushes away from the reference.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    bounded = (-log_ratio.detach()).clamp(max=20.0).exp()
    exponential = bounded + bounded * (log_ratio.detach() - log_ratio)  # value and slope: `bounded`
    return exponential - 1 + log_ratio


# ---------------------------------------------------------------------------------------------------------
# The critic


def critic_loss(outputs: Outputs, batch: RowBatch, clip: float | None) -> LossAndMetrics:
    """The weighted sum over the batch's tokens of the clipped value loss, and metrics to log."""
    import torch

    counts = batch.loss_weights > 0
    values, old, returns = (
        tensor.where(counts, 0.0)
        for tensor in (state_values(outputs.values), batch.arrays["values"], batch.arrays["returns"])
    )
    losses, clipped = value_loss(values, old, returns, clip)
    total = (batch.loss_weights * losses).sum()
    summed, weight, n_clipped, n_tokens, value = torch.stack(
        [total.detach(), batch.loss_weights.sum(), clipped.sum(), counts.sum(), values.detach().sum()]
    ).tolist()
    return total, {"loss": (summed, weight), "clip_fraction": (n_clipped, n_tokens), "value/mean": (value, n_tokens)}


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 max((V_c - R)^2, (V - R)^2) per token, V_c = V_old + clip(V - V_old, -clip, clip), and bool: clipped.

    All tensors the same shape. Source: the value loss of PPO's reference implementation (OpenAI baselines, `ppo2`).
    """
    unclipped = (values - returns).square()
    if clip is None:
        return 0.5 * unclipped, values.new_zeros(values.shape, dtype=bool)
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    return 0.5 * clipped.maximum(unclipped), clipped > unclipped


def state_values(outputs: Tensor) -> Tensor:
    """[B, T] V(s_t): the head's output at t - 1, since its output at t has already seen token t; 0 at t = 0."""
    import torch

    return torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], 1)


# ---------------------------------------------------------------------------------------------------------
# MetricSums


def token_metrics(means: Mapping[str, Tensor], log_ratio: Tensor, mask: Tensor) -> MetricSums:
    """Means over the tokens in `mask`, and statistics of the ratio r to the old policy.

    Every tensor is [B, T], and finite where `mask` (bool) is set. `policy/approx_kl` is the estimate
    r - 1 - log r of KL(old || new), from samples of the old policy (J. Schulman, 2020). `policy/effective_share` is
    sum r / sum r^2: Kish's effective sample size as a share of the tokens, if the mean of r is 1.
    """
    import torch

    log_ratio = log_ratio.detach().clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    means = {**means, "policy/approx_kl": ratio - 1 - log_ratio}
    # One transfer for all numbers: each `.item()` would wait for the accelerator.
    count, max_ratio, min_ratio, weight, squared, *sums = torch.stack(
        [
            mask.sum().float(),
            ratio.where(mask, -math.inf).max(),
            ratio.where(mask, math.inf).min(),
            ratio.where(mask, 0.0).sum(),
            ratio.square().where(mask, 0.0).sum(),
            *(values.detach().float().where(mask, 0.0).sum() for values in means.values()),
        ]
    ).tolist()
    if not count:
        return {}
    metrics = {name: (total, count) for name, total in zip(means, sums, strict=True)}
    clipped = metrics["policy/clip_fraction_low"][0] + metrics["policy/clip_fraction_high"][0]
    return metrics | {
        "policy/clip_fraction": (clipped, count),
        "policy/ratio/max": (max_ratio, 1.0),
        "policy/ratio/min": (min_ratio, 1.0),
        "policy/effective_share": (weight, squared),
    }
