"""Distillation: a smaller model is trained on a larger model's distribution at each token, not only on the answer.

Source: G. Hinton et al., "Distilling the Knowledge in a Neural Network" (2015); token by token as in Y. Kim and A.
Rush, "Sequence-Level Knowledge Distillation" (2016), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import LearnerConfig, Outputs, RoleSpec, RowBatch
from envgym.types import Group, Row

from .settings import DistillConfig
from .sft import SFT

if TYPE_CHECKING:
    from .losses import LossAndMetrics


class Distill(SFT):
    """Cross-entropy of the answers, and the forward KL from a teacher at each of their tokens. The teacher (role
    `teacher`) has the student's vocabulary."""

    Config: ClassVar[type[LearnerConfig]] = DistillConfig
    config: DistillConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {
            "actor": RoleSpec(trained=True, scored=False, extra_token_ids="teacher_ids"),
            "teacher": RoleSpec(top_k=self.config.top_k, needs_model=True),
        }

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        rows = super().prepare(groups)
        for row in rows:
            top_tokens = row.arrays["teacher"]
            row.arrays["teacher"], row.arrays["teacher_ids"] = top_tokens[..., 0], top_tokens[..., 1]
        return rows

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        import torch

        from .losses import cross_entropy, topk_forward_kl

        nll, metric = cross_entropy(outputs, batch)
        counts = batch.loss_weights > 0
        student, teacher = outputs.extra_logprobs[counts], batch.arrays["teacher"][counts]
        distance = (batch.loss_weights[counts] * topk_forward_kl(student, teacher)).sum()
        total = torch.lerp(nll, distance, self.config.kd_coef) / normalizers[batch.objective]
        return total, {"loss": metric, "distill/kl": (float(distance.detach()), metric[1])}
