"""A process reward model: the probability that each step of a solution is right.

Source: H. Lightman et al., "Let's Verify Step by Step" (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.learner import Learner, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Group, Objective, Row

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray


class ProcessRewardModel(Learner):
    """Trains the policy's model, with a scalar head, to tell right steps of a solution from wrong ones. A turn is a
    step, and its reward in [0, 1] the label, which may be soft; the head is read at the step's last token. Steps
    without a reward have no loss."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False, head="scalar")}

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        import numpy as np

        labelled = []
        for row in self.rows_to_score(groups):
            ends = np.cumsum([len(segment) for segment in row.segments])
            indices = [end - 1 for end, segment in zip(ends, row.segments, strict=True) if segment.role == "action"]
            labels = np.full(len(row), np.nan, np.float32)
            for index, turn in zip(indices, row.turns, strict=True):
                labels[index] = np.nan if turn.reward is None else turn.reward
            weights = np.isfinite(labels).astype(np.float32)
            if weights.any():
                row.arrays["labels"] = labels
                labelled.append(row.copy_with(objective=Objective.LABEL, loss_weights=weights))
        return labelled

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from torch.nn.functional import binary_cross_entropy_with_logits

        counts = batch.loss_weights > 0
        values, labels = outputs.values[counts], batch.arrays["labels"][counts]
        losses = binary_cross_entropy_with_logits(values, labels, reduction="none")
        n = float(len(losses))
        right = ((values > 0) == (labels > 0.5)).sum()
        total = losses.sum() / normalizers[batch.objective]
        return total, {"loss": (float(losses.detach().sum()), n), "step/accuracy": (float(right), n)}

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss` and `eval/accuracy` over steps; a probability above one half predicts a right step."""
        metrics = self.loss_metrics(rows, outputs)
        return {"eval/loss": metrics["loss"], "eval/accuracy": metrics["step/accuracy"]}
