"""Supervised fine-tuning: cross-entropy on the action tokens, a mean over the tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, LearnerConfig, Outputs, RowBatch, TrainSample, Trajectory
from envgym.types import Objective

from .settings import SFTConfig

if TYPE_CHECKING:
    from envgym.learner import FloatArray

    from .losses import LossAndMetrics


class SFT(Learner):
    """Trains on the unmodified actions of its episodes: replayed demonstrations, or selected samples."""

    Config: ClassVar[type[LearnerConfig]] = SFTConfig
    config: SFTConfig

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        best = self.config.select == "best"
        selected = [trajectory for group in groups for trajectory in (best_of(group) if best else group)]
        samples = [sample for trajectory in selected for sample in trajectory.samples]
        for sample in samples:
            sample.objective = Objective.CROSS_ENTROPY
            sample.drop_sampling_info()
        return samples

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from .losses import cross_entropy

        total, metric = cross_entropy(outputs, batch)
        return total / normalizers[batch.objective], {"loss": metric}

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`: cross-entropy per token, in nats."""
        total = sum(float(sample.loss_weights.sum()) for sample in samples)
        nll = -sum(float((sample.loss_weights * output).sum()) for sample, output in zip(samples, outputs, strict=True))
        return {"eval/loss": nll / max(total, 1e-8)}


def best_of(group: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """The trajectory of the highest reward, the first among equals; none if no trajectory has a reward."""
    rewards = {i: member.episode.reward for i, member in enumerate(group) if member.episode.reward is not None}
    return [group[max(rewards, key=lambda index: rewards[index])]] if rewards else []
