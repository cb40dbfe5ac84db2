"""Distillation: a smaller model is trained on a larger model's distribution at each token, not only on the answer.

Source: G. Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); token by token as in Y. Kim and A.
Rush, "Sequence-Level Knowledge Distillation" (2016), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from envgym.learner import LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Group, Objective, Row

from .sft import SFT, SFTConfig

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
"""Remaining probability below which it is taken for rounding error, and 0."""


class DistillConfig(SFTConfig):
    """Settings of distillation."""

    kd_coef: float = Field(0.4, ge=0, le=1)
    """Weight of the KL from the teacher; the cross-entropy of the answers has the remaining weight."""
    top_k: int = Field(64, ge=1)
    """Number of the teacher's most likely tokens in the KL; all other tokens count as one more."""


class Distill(SFT):
    """Cross-entropy of the answers, and the forward KL from a teacher at each of their tokens. The teacher (role
    `teacher`) has the student's vocabulary."""

    Config = DistillConfig
    config: DistillConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {
            "actor": RoleSpec(trained=True, scored=False, extra_token_ids="teacher_ids"),
            "teacher": RoleSpec(top_k=self.config.top_k, needs_model=True),
        }

    def rows_to_score(self, groups: Sequence[Group]) -> list[Row]:
        rows = super().rows_to_score(groups)
        for row in rows:
            row.drop_sampling_info()  # as the student is trained
        return rows

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        rows = super().prepare(groups)
        for row in rows:
            top_tokens = row.arrays["teacher"]
            row.arrays["teacher"], row.arrays["teacher_ids"] = top_tokens[..., 0], top_tokens[..., 1]
        return rows

    def token_shares(self, objective: Objective, weights: Mapping[int, float]) -> None:
        return None

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        nll, metrics = super().loss(role, outputs, batch, normalizers)
        counts = batch.loss_weights > 0
        student, teacher = outputs.extra_logprobs[counts], batch.arrays["teacher"][counts]
        kl = (batch.loss_weights[counts] * topk_forward_kl(student, teacher)).sum()
        total = nll.lerp(kl / normalizers[batch.objective], self.config.kd_coef)
        return total, metrics | {"distill/kl": (float(kl.detach()), float(batch.loss_weights.sum()))}


def topk_forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """[tokens] the KL of the student's distribution q from the teacher's p, in nats: sum p (log p - log q).

    student, teacher [tokens, k]: log-probabilities of the teacher's k most likely tokens. All other tokens count as
    one more token, of probability 0 if k is the whole vocabulary: then the KL is exact.
    """
    p_rest, q_rest = remainder(teacher), remainder(student)
    rest_kl = (p_rest * (p_rest.clamp(min=EPS) / q_rest.clamp(min=EPS)).log()).where(p_rest > 0, 0.0)
    return (teacher.exp() * (teacher - student)).sum(-1) + rest_kl


def remainder(logprobs: Tensor) -> Tensor:
    """The probability mass outside the tokens of the last dimension, 1 - sum exp(logprobs); 0 if below `EPS`."""
    mass = 1 - logprobs.exp().sum(-1)
    return mass.where(mass > EPS, 0.0)
