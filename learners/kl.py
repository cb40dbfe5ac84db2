"""Estimators of KL(pi || pi_ref) from log-probabilities of sampled tokens.

Source: J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Per-token estimate, in nats, same shape as the inputs.

    With l = log pi - log pi_ref: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l, where -l is bounded at 20 so that
    one token cannot overflow the loss.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).clamp(max=20.0).exp() - 1 + log_ratio
