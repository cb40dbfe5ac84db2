"""Correction of the gap between the sampler and the trainer, whose kernels give one token two probabilities.

Every function decides with `where`: what stands at a masked or dropped place is read by nothing, and may be NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.settings import Settings

if TYPE_CHECKING:
    import torch

Kind = Literal["none", "tis", "icepop", "seq_mask_tis"]


class CorrectionConfig(Settings):
    """Weights w = pi_trainer / pi_sampler on the policy loss, at the start of the update."""

    kind: Kind = "none"
    """`tis`: w, at most `high`; `icepop`: w, and tokens with w outside [low, high] are dropped; `seq_mask_tis`: as
    `tis`, and episodes whose geometric mean of w is outside are dropped."""
    low: float = Field(0.5, ge=0)
    """What w may be at least."""
    high: float = Field(5.0, gt=0, validate_default=True)
    """What w may be at most."""

    @property
    def drops(self) -> bool:
        """Whether it may leave tokens out."""
        return self.kind in ("icepop", "seq_mask_tis")

    @field_validator("high")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        if high < info.data.get("low", 0.0):
            raise ValueError(f"it is below correction.low ({info.data['low']:g})")
        return high


def correction(
    old: torch.Tensor,
    sampled: torch.Tensor,
    weights: torch.Tensor,
    episodes: torch.Tensor,
    config: CorrectionConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] what each token's policy loss is multiplied by (no gradient), and [B, T] bool which tokens are kept.

    old, sampled [B, T] nats: the trainer's log-probabilities at the start of the update, and the sampler's; weights
    [B, T], above 0 where a token counts; episodes [B]. The factor is 0 where a token is not kept.

    Sources: `tis` F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    `icepop` X. Zhao et al., "Small Leak Can Sink a Great Ship" (2025); the geometric mean that decides on sequences
    J. Liu et al., "When Speed Kills Stability" (2025).
    """
    import torch

    counts = weights > 0
    log_weights = torch.where(counts, (old - sampled).detach(), 0.0)
    factors = log_weights.clamp(-20.0, 20.0).exp()
    kept = counts
    if config.kind == "icepop":
        kept = counts & (factors >= config.low) & (factors <= config.high)
    else:
        factors = factors.clamp(max=config.high)
    if config.kind == "seq_mask_tis":
        means = episode_means(log_weights, torch.where(counts, weights, 0.0), episodes).exp()
        kept = counts & ((means >= config.low) & (means <= config.high))[:, None]
    return torch.where(kept, factors, 0.0), kept


def episode_means(values: torch.Tensor, weights: torch.Tensor, episodes: torch.Tensor) -> torch.Tensor:
    """[B] the weighted mean of `values` [B, T] over all rows of each row's episode; 0 where nothing has weight.

    All rows of an episode must be in the batch. What is infinite or NaN in one episode stays there.
    """
    import torch

    same = episodes[:, None] == episodes[None, :]
    totals, counted = (values * weights).sum(1), weights.sum(1)
    total, count = (torch.where(same, sums[None, :], 0.0).sum(1) for sums in (totals, counted))
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0)
