"""The critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """0.5 max((V_c - R)^2, (V - R)^2) per token, V_c = V_old + clip(V - V_old, -clip, clip), and where the bound held.

    All tensors the same shape. Source: the value loss of PPO's reference implementation (OpenAI baselines, `ppo2`).
    """
    import torch

    unclipped = (values - returns).square()
    if clip is None:
        return 0.5 * unclipped, torch.zeros_like(values, dtype=torch.bool)
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(clipped, unclipped), clipped > unclipped


def state_values(outputs: torch.Tensor) -> torch.Tensor:
    """[B, T] the value of the state in which each token was chosen: what the head says at the token before it.

    A scalar head at t has read token t, which must not be part of the state that t was chosen in.
    """
    import torch

    return torch.cat([torch.zeros_like(outputs[:, :1]), outputs[:, :-1]], 1)
