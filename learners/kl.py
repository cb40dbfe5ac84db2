"""KL(pi || pi_ref) from log-probabilities of sampled tokens, and the coefficient it is weighed with.

Source: J. Schulman, "Approximating KL Divergence" (2020); the controller: D. Ziegler et al., "Fine-Tuning Language
Models from Human Preferences" (2019), section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.settings import Settings

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]
Place = Literal["reward", "loss"]


class KLConfig(Settings):
    """How far the policy may go from the reference model, and where it pays for that."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model. 0 builds no reference model."""
    estimator: Estimator = "k3"
    """How the KL is estimated from the sampled tokens: `k1` log-ratio, `k2` half its square, `k3` never negative and of
    low variance. In the loss `k1` has no gradient on average; `k2` has the KL's own."""
    place: Place = "loss"
    """`reward`: every action token pays `coef` times its KL at the start of the update; `loss`: a term of the loss."""
    target: float | None = Field(None, gt=0)
    """The KL, in nats a token, that the coefficient is adapted to keep; unset: it stays as it is."""
    horizon: int = Field(10000, ge=1)
    """Episodes over which the coefficient adapts."""

    @field_validator("target")
    @classmethod
    def _has_something_to_adapt(cls, target: float | None, info: ValidationInfo) -> float | None:
        if target is not None and not info.data.get("coef", 1.0):
            raise ValueError("a target adapts kl.coef, which is 0 and would stay 0")
        return target


class RewardKL(KLConfig):
    """The KL as part of the reward, by default."""

    estimator: Estimator = "k1"
    place: Place = "reward"


class SquaredKL(KLConfig):
    """The KL as half the squared log-ratio in the loss, by default: its gradient is the KL's own."""

    estimator: Estimator = "k2"


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Per-token estimate, in nats, same shape as the inputs.

    With l = log pi - log pi_ref: k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l, where -l is bounded at 20 so that
    one token cannot overflow the loss. The bound holds its gradient, 1 - exp(-l), as it does the value: without one of
    its own beyond it, the exponential would leave the 1, which pushes away from the reference.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    bounded = (-log_ratio.detach()).clamp(max=20.0).exp()
    exponential = bounded + bounded * (log_ratio.detach() - log_ratio)  # `bounded`, with itself as derivative by -l
    return exponential - 1 + log_ratio


def adapted(coef: float, kl: float, *, target: float, horizon: int, episodes: int) -> float:
    """The coefficient after `episodes` more episodes whose mean KL was `kl`: a proportional controller in log space.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) episodes / horizon), not below 0.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * max(0.0, 1 + error * episodes / horizon)
