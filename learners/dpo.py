"""DPO: the policy is trained on preferences without a reward model; settings make it IPO or cDPO.

Sources: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023);
M. G. Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), for IPO; E.
Mitchell, "A note on DPO with noisy preferences" (2023), for label smoothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.learner import LearnerConfig, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Row

from .pairs import PairLearner, pair_metrics, pair_sums

if TYPE_CHECKING:
    from torch import Tensor


class DPOConfig(LearnerConfig):
    """Settings of DPO."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference model: with a smaller beta the policy may diverge further."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO's logistic loss; `ipo`: a squared one, which does not push separated pairs apart."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels (cDPO)."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the cross-entropy of the chosen answers, a mean over their tokens."""

    @field_validator("label_smoothing")
    @classmethod
    def _is_the_sigmoids(cls, smoothing: float, info: ValidationInfo) -> float:
        if smoothing and info.data.get("loss") == "ipo":
            raise ValueError("label_smoothing is for loss=sigmoid: IPO's loss is not sure of its labels anyway")
        return smoothing


class DPO(PairLearner):
    """Direct preference optimisation, on recorded pairs or on the best and the worst of sampled groups."""

    Config = DPOConfig
    config: DPOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False), "reference": RoleSpec()}

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        answers = [row for row in rows if "chosen" in row.arrays and row.arrays["chosen"][0]]
        weight = sum(float(row.loss_weights.sum()) for row in answers)
        return super().loss_normalizers(rows) | {"nll": max(1e-8, weight)}

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        policy = pair_sums(outputs.logprobs, batch)
        reference = pair_sums(batch.arrays["reference"], batch)
        chosen_rewards, rejected_rewards = (self.config.beta * (p - r) for p, r in zip(policy, reference, strict=True))
        losses = dpo_loss(chosen_rewards - rejected_rewards, self.config)
        n = float(len(losses))
        total = losses.sum() / normalizers[batch.objective]
        metrics = pair_metrics(losses, chosen_rewards, rejected_rewards) | {
            "reward/chosen": (float(chosen_rewards.detach().sum()), n),
            "reward/rejected": (float(rejected_rewards.detach().sum()), n),
        }
        if self.config.nll_coef:
            nll, weight = nll_of_chosen(outputs.logprobs, batch)
            total = total + self.config.nll_coef * nll / normalizers["nll"]
            metrics["nll"] = (float(nll.detach()), weight)
        return total, metrics


def dpo_loss(margin: Tensor, config: DPOConfig) -> Tensor:
    """The loss of pairs from their `margin` m: beta times the log-ratio log pi - log pi_ref of the chosen answer minus
    that of the rejected one.

    `sigmoid`: -(1 - e) log sigmoid(m) - e log sigmoid(-m), with label smoothing e (R. Rafailov et al., 2023, eq. 7;
    cDPO: E. Mitchell, 2023). `ipo`: (m / beta - 1 / (2 beta))^2 (M. G. Azar et al., 2023, eq. 17).
    """
    from torch.nn.functional import logsigmoid

    if config.loss == "ipo":
        return (margin / config.beta - 1 / (2 * config.beta)).square()
    correct, flipped = (logsigmoid(sign * margin) for sign in (1, -1))
    return -(1 - config.label_smoothing) * correct - config.label_smoothing * flipped


def nll_of_chosen(logprobs: Tensor, batch: RowBatch) -> tuple[Tensor, float]:
    """The weighted sum of -log pi over the chosen answers' tokens, and the sum of their weights."""
    weights = batch.loss_weights * batch.arrays["chosen"]
    return (-weights * logprobs).where(weights > 0, 0.0).sum(), float(weights.sum())
