"""A process reward model: the probability that each step of a solution is right.

Source: H. Lightman et al., "Let's Verify Step by Step" (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.learner import Learner, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory
from envgym.types import Objective

if TYPE_CHECKING:
    from envgym.learner import FloatArray

    from .losses import LossAndMetrics


class ProcessRewardModel(Learner):
    """Trains the policy's model, with a scalar head, to tell right steps of a solution from wrong ones. A turn is a
    step, and its reward in [0, 1] the label, which may be soft; the head is read at the step's last token. Steps
    without a reward have no loss."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False, head="scalar")}

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        import numpy as np

        samples = []
        for trajectory in (trajectory for group in groups for trajectory in group):
            for row, sample in zip(trajectory.episode.rows, trajectory.samples, strict=True):
                ends = np.cumsum([len(segment) for segment in row.segments])
                indices = [end - 1 for end, segment in zip(ends, row.segments, strict=True) if segment.role == "action"]
                labels = np.full(len(sample), np.nan, np.float32)
                for index, turn in zip(indices, row.turns, strict=True):
                    labels[index] = np.nan if turn.reward is None else turn.reward
                sample.objective = Objective.LABEL
                sample.loss_weights = np.isfinite(labels).astype(np.float32)
                sample.arrays["labels"] = labels
                if sample.loss_weights.any():
                    samples.append(sample)
        return samples

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from .losses import step_loss

        counts = batch.loss_weights > 0
        values, labels = outputs.values[counts], batch.arrays["labels"][counts]
        losses = step_loss(values, labels)
        n = float(len(losses))
        right = ((values > 0) == (labels > 0.5)).sum()
        total = losses.sum() / normalizers[batch.objective]
        return total, {"loss": (float(losses.detach().sum()), n), "step/accuracy": (float(right), n)}

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss` and `eval/accuracy` over steps; a probability above one half predicts a right step."""
        import numpy as np
        import torch

        from .losses import step_loss

        masks = [sample.loss_weights > 0 for sample in samples]
        values = np.concatenate([output[mask] for output, mask in zip(outputs, masks, strict=True)])
        labels = np.concatenate([sample.arrays["labels"][mask] for sample, mask in zip(samples, masks, strict=True)])
        losses = step_loss(torch.from_numpy(values).double(), torch.from_numpy(labels).double())
        return {"eval/loss": float(losses.mean()), "eval/accuracy": float(((values > 0) == (labels > 0.5)).mean())}
