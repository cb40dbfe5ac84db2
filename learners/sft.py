"""Supervised fine-tuning: cross-entropy on the action tokens, a mean over the tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, LearnerConfig, Outputs, RowBatch
from envgym.types import Episode, Group, Objective, Row

from .settings import SFTConfig

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray

    from .losses import LossAndMetrics


class SFT(Learner):
    """Trains on the unmodified actions of its episodes: replayed demonstrations, or selected samples."""

    Config: ClassVar[type[LearnerConfig]] = SFTConfig
    config: SFTConfig

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        best = self.config.select == "best"
        selected = [episode for group in groups for episode in (best_of(group) if best else group.episodes)]
        rows = [row.copy_with(objective=Objective.CROSS_ENTROPY) for episode in selected for row in episode.rows]
        for row in rows:
            row.drop_sampling_info()
        return rows

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from .losses import cross_entropy

        total, metric = cross_entropy(outputs, batch)
        return total / normalizers[batch.objective], {"loss": metric}

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`: cross-entropy per token, in nats."""
        total = sum(float(row.loss_weights.sum()) for row in rows)
        nll = -sum(float((row.loss_weights * output).sum()) for row, output in zip(rows, outputs, strict=True))
        return {"eval/loss": nll / max(total, 1e-8)}


def best_of(group: Group) -> list[Episode]:
    """The episode of the highest reward, the first among equals; none if no episode has a reward."""
    rewarded = [(episode.reward, episode) for episode in group.episodes if episode.reward is not None]
    return [max(rewarded, key=itemgetter(0))[1]] if rewarded else []
