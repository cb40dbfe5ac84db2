"""Supervised fine-tuning: cross-entropy on the action tokens, a mean over the tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.learner import Learner, Metrics, Outputs, RowBatch, TrainSample, Trajectory

if TYPE_CHECKING:
    import torch

    from envgym.learner import FloatArray


class SFT(Learner):
    """Teaches the actions of its episodes as they stand: demonstrations that were replayed, or samples selected."""

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        return [sample for group in groups for trajectory in group for sample in trajectory.samples]

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        from .losses import cross_entropy

        total, metric = cross_entropy(outputs, batch)
        return total / denominators[batch.objective], {"loss": metric}

    def evaluate(self, rows: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`: cross-entropy a token, in nats."""
        total = sum(float(row.loss_weights.sum()) for row in rows)
        nll = -sum(float((row.loss_weights * output).sum()) for row, output in zip(rows, outputs, strict=True))
        return {"eval/loss": nll / max(total, 1e-8)}
