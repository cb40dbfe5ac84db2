"""Supervised fine-tuning: cross-entropy on the action tokens, a mean over the tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from envgym.learner import Learner, LearnerConfig, LossAndMetrics, Outputs, RowBatch
from envgym.types import Episode, Group, Objective, Row

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray


class SFTConfig(LearnerConfig):
    """Settings of supervised fine-tuning."""

    select: Literal["all", "best"] = "all"
    """Episodes of each task to train on: all, or the one of the highest reward (rejection sampling)."""


class SFT(Learner):
    """Trains on the unmodified actions of its episodes: replayed demonstrations, or selected samples."""

    Config = SFTConfig
    config: SFTConfig

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        best = self.config.select == "best"
        selected = [episode for group in groups for episode in (best_of(group) if best else group.episodes)]
        rows = [row.copy_with(objective=Objective.CROSS_ENTROPY) for episode in selected for row in episode.rows]
        for row in rows:
            row.drop_sampling_info()
        return rows

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        nll = batch.weighted_sum(-outputs.logprobs)
        metrics = {"loss": (float(nll.detach()), float(batch.loss_weights.sum()))}
        return nll / normalizers[batch.objective], metrics

    def token_shares(self, objective: Objective, weights: Mapping[int, float]) -> Mapping[int, float] | None:
        return dict.fromkeys(weights, 1 / max(1e-8, sum(weights.values())))

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`: cross-entropy per token, in nats."""
        total = sum(float(row.loss_weights.sum()) for row in rows)
        nll = -sum(float((row.loss_weights * output).sum()) for row, output in zip(rows, outputs, strict=True))
        return {"eval/loss": nll / max(total, 1e-8)}


def best_of(group: Group) -> list[Episode]:
    """The episode of the highest reward, the first among equals; none if no episode has a reward."""
    rewarded = [(episode.reward, episode) for episode in group.episodes if episode.reward is not None]
    return [max(rewarded, key=itemgetter(0))[1]] if rewarded else []
