"""Pairs of a chosen and a rejected answer to one task, which DPO and reward models are trained on.

A recorded preference is a group of two with rewards 1 and 0; in a sampled group the best and the worst answer form a
pair. So one learner serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import itemgetter
from typing import TYPE_CHECKING

from envgym.learner import Learner, MetricSums, RowBatch
from envgym.types import Episode, Group, Objective, Row

if TYPE_CHECKING:
    from torch import Tensor

    from envgym.types.episodes import FloatArray

Pair = tuple[Episode, Episode]
"""The chosen episode and the rejected one."""


class PairLearner(Learner):
    """Base of learners on pairs. Their loss is a mean over the pairs of the optimizer step.

    A pair is a unit of the micro-batch. `arrays["chosen"]` is 1 at every token of its chosen rows, 0 at those of the
    rejected ones. Pairs of identical answers, such as answers truncated before they differ, are left out.
    """

    min_group_size = 2
    _n_identical = 0

    def rows_to_score(self, groups: Sequence[Group]) -> list[Row]:
        rows = super().rows_to_score(groups)
        for row in rows:
            row.drop_sampling_info()
        return rows

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        import numpy as np

        pairs, rows = best_and_worst(groups) or identical_pairs(groups), []
        distinct = [pair for pair in pairs if _token_ids(pair[0]) != _token_ids(pair[1])]
        self._n_identical = len(pairs) - len(distinct)
        for unit, pair in enumerate(distinct or pairs):  # a step of nothing else has a loss without a gradient
            for episode, label in zip(pair, (1.0, 0.0), strict=True):
                for row in self.rows_of(episode):
                    row.arrays["chosen"] = np.full(len(row), label, np.float32)
                    rows.append(row.copy_with(objective=Objective.PREFERENCE, microbatch_key=unit))
        return rows

    def rows_of(self, episode: Episode) -> list[Row]:
        """The rows of one side of a pair."""
        return episode.rows

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        units = {row.microbatch_key for row in rows if row.objective == Objective.PREFERENCE}
        return super().loss_normalizers(rows) | {Objective.PREFERENCE: max(1.0, float(len(units)))}

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        identical = {"preference/identical": float(self._n_identical)} if self._n_identical else {}
        return {"preference/pairs": self.loss_normalizers(rows)[Objective.PREFERENCE], **identical}

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`; `eval/accuracy`, the share of pairs with a positive margin; and `eval/margin`, the mean margin
        of the chosen answer's reward over the rejected one's (of DPO: of the log-ratio times `beta`, in nats)."""
        metrics = self.loss_metrics(rows, outputs)
        names = ("loss", "preference/accuracy", "preference/margin")
        return {f"eval/{name.removeprefix('preference/')}": metrics[name] for name in names}


def _token_ids(episode: Episode) -> list[list[int]]:
    """The tokens of an answer and its prompt: those of two answers may be equal after they were truncated."""
    return [row.token_ids.tolist() for row in episode.rows]


def best_and_worst(groups: Sequence[Group]) -> list[Pair]:
    """The best and the worst of each group by reward, the first among equals; no pair if all rewards are equal."""
    pairs = []
    for group in groups:
        rewarded = [(e.reward, e) for e in group.episodes if e.reward is not None and e.rows]
        if len({reward for reward, _ in rewarded}) > 1:
            best, worst = (pick(rewarded, key=itemgetter(0))[1] for pick in (max, min))
            pairs.append((best, worst))
    return pairs


def identical_pairs(groups: Sequence[Group]) -> list[Pair]:
    """An episode and a copy of it, for a step in which all rewards of every group are equal."""
    for episode in (episode for group in groups for episode in group.episodes if episode.rows):
        twin = copy(episode)
        twin.rows = [row.copy_with(arrays={**row.arrays}) for row in episode.rows]
        return [(episode, twin)]
    return []


def pair_metrics(losses: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor) -> MetricSums:
    """`loss`, `preference/accuracy` and `preference/margin` of pairs, from the three [pairs]."""
    n = float(len(losses))
    return {
        "loss": (float(losses.detach().sum()), n),
        "preference/accuracy": (float((chosen_rewards > rejected_rewards).sum()), n),
        "preference/margin": (float((chosen_rewards - rejected_rewards).detach().sum()), n),
    }


def pair_sums(values: Tensor, batch: RowBatch) -> tuple[Tensor, Tensor]:
    """[pairs] each: the sums of `values` over the chosen and over the rejected answers' tokens of positive weight."""
    is_chosen = batch.arrays["chosen"][:, 0] > 0
    return batch.unit_sums(values, is_chosen), batch.unit_sums(values, ~is_chosen)
