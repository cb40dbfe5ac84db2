"""Supervised fine-tuning: cross-entropy on the action tokens, a mean over the tokens of the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.learner import Learner, LearnRow, Metrics, Outputs, RowBatch
from envgym.types import Group

if TYPE_CHECKING:
    import torch

    from envgym.learner import FloatArray


class SFT(Learner):
    """Teaches the actions of its episodes as they stand: demonstrations that were replayed, or samples selected."""

    def prepare(self, groups: Sequence[Group]) -> list[LearnRow]:
        episodes = [episode for group in groups for episode in group.episodes]
        return [
            LearnRow.of(row, episode=index, unit=index)
            for index, episode in enumerate(episodes)
            for row in episode.rows
        ]

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        import torch

        counts = batch.weights > 0
        nll = torch.where(counts, -batch.weights * outputs.logprobs, 0.0).sum()
        return nll / denominators[batch.objective], {"loss": (float(nll.detach()), float(batch.weights.sum()))}

    def evaluate(self, rows: Sequence[LearnRow], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`: cross-entropy a token, in nats."""
        total = sum(float(row.weights.sum()) for row in rows)
        nll = -sum(float((row.weights * output).sum()) for row, output in zip(rows, outputs, strict=True))
        return {"eval/loss": nll / max(total, 1e-8)}
