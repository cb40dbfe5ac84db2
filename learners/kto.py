"""KTO: answers that are each labelled good or bad, without pairs.

Source: K. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from envgym.learner import Learner, LearnerConfig, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Group, Objective, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from envgym.types.episodes import FloatArray


class KTOConfig(LearnerConfig):
    """Settings of KTO."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference model; a larger beta saturates the loss sooner."""
    desirable: float = Field(1.0, ge=0)
    """Weight of good answers. Choose both so that good and bad answers have about equal total weight."""
    undesirable: float = Field(1.0, ge=0)
    """Weight of bad answers."""


class KTO(Learner):
    """Kahneman-Tversky optimisation. An episode is good if its reward is above one half.

    The KL baseline z is the mean log-ratio to the reference model over mismatched rows: each prompt with the answer
    of the previous episode of the training step, the first prompt with the last answer. It is computed before the
    step's updates, so that it does not depend on micro-batches and ranks.
    """

    Config = KTOConfig
    config: KTOConfig

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(config)
        self._mismatched: list[Row] = []

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=True), "reference": RoleSpec()}

    def rows_to_score(self, groups: Sequence[Group]) -> list[Row]:
        """The episodes' rows and, for the KL baseline, a mismatched row per episode."""
        episodes = with_answers(groups)
        for row in (row for episode in episodes for row in episode.rows):
            row.drop_sampling_info()
        pairs = zip(episodes, [*episodes[-1:], *episodes[:-1]], strict=True)
        self._mismatched = [mismatched_row(prompt_from=p.rows[0], answer_from=a.rows[0]) for p, a in pairs]
        return [row for e, extra in zip(episodes, self._mismatched, strict=True) for row in (*e.rows, extra)]

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        """Mark each row as good or bad, and add the KL baseline: the mean log ratio of the rows that
        `rows_to_score` mismatched."""
        import numpy as np

        log_ratios = [weighted_sum(row, row.arrays["actor"] - row.arrays["reference"]) for row in self._mismatched]
        baseline = max(0.0, float(np.mean(log_ratios)))
        rows = []
        for episode in with_answers(groups):
            assert episode.reward is not None, "a labelled answer has a reward"
            constants = {"good": float(episode.reward > 0.5), "baseline": baseline}
            for row in episode.rows:
                row.arrays |= {k: np.full(len(row), v, np.float32) for k, v in constants.items()}
                del row.arrays["actor"]
                rows.append(row.copy_with(objective=Objective.LABEL))
        return rows

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        episodes = {row.episode_index for row in rows if row.objective == Objective.LABEL}
        return super().loss_normalizers(rows) | {Objective.LABEL: max(1.0, float(len(episodes)))}

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        log_ratios = batch.unit_sums(outputs.logprobs) - batch.unit_sums(batch.arrays["reference"])
        labels, baseline = unit_constants("good", batch), unit_constants("baseline", batch)
        losses = kto_loss(log_ratios, baseline, labels > 0, self.config)
        right = (log_ratios.detach() > baseline) == (labels > 0)
        rewards, n, n_good = self.config.beta * log_ratios.detach(), float(len(losses)), float(labels.sum())
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float(right.sum()), n),
            "reward/good": (float((rewards * labels).sum()), n_good),
            "reward/bad": (float((rewards * (1 - labels)).sum()), n - n_good),
            "policy/kl": (float(baseline.sum()), n),
        }
        return losses.sum() / normalizers[batch.objective], metrics

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`; `eval/accuracy`, the share of answers whose log-ratio is above the KL baseline if good and below
        it if bad; and, given answers of both kinds, `eval/margin`, the mean log-ratio of good answers minus that of bad
        ones, in nats times `beta`."""
        metrics = self.loss_metrics(rows, outputs)
        result = {"eval/loss": metrics["loss"], "eval/accuracy": metrics["preference/accuracy"]}
        if {"reward/good", "reward/bad"} <= metrics.keys():
            result["eval/margin"] = metrics["reward/good"] - metrics["reward/bad"]
        return result


def kto_loss(log_ratio: Tensor, baseline: Tensor, is_good: Tensor, config: KTOConfig) -> Tensor:
    """w_d (1 - sigmoid(beta (l - z))) of good answers and w_u (1 - sigmoid(beta (z - l))) of bad ones.

    l is the `log_ratio` log pi - log pi_ref of an answer, z the `baseline`, `is_good` bool; all one shape. Source: K.
    Ethayarajh et al. (2024), eq. 8.
    """
    margin = config.beta * (log_ratio - baseline)
    desirable, undesirable = config.desirable * (-margin).sigmoid(), config.undesirable * margin.sigmoid()
    return desirable.where(is_good, undesirable)


def unit_constants(name: str, batch: RowBatch) -> Tensor:
    """[units] the value of `batch.arrays[name]`, which is constant over the tokens of a unit."""
    units, index = batch.units.unique(return_inverse=True)
    return batch.arrays[name].new_zeros(len(units)).index_copy(0, index, batch.arrays[name][:, 0])


def weighted_sum(row: Row, values: FloatArray) -> float:
    """The weighted sum of `values` [T] over the tokens of positive weight."""
    import numpy as np

    counts = row.loss_weights > 0
    return float(row.loss_weights[counts].astype(np.float64) @ values[counts])


def with_answers(groups: Sequence[Group]) -> list[Episode]:
    """The episodes with an answer to learn from."""
    episodes = [episode for group in groups for episode in group.episodes]
    return [episode for episode in episodes if episode.rows and (episode.rows[0].loss_weights > 0).any()]


def mismatched_row(prompt_from: Row, answer_from: Row) -> Row:
    """A row to score: the prompt of one episode followed by the last answer of another."""
    import numpy as np

    prompt_end, answer_start = (last_run(row.loss_weights > 0) for row in (prompt_from, answer_from))
    token_ids = np.concatenate([prompt_from.token_ids[:prompt_end], answer_from.token_ids[answer_start:]])
    weights = np.concatenate([np.zeros(prompt_end, np.float32), answer_from.loss_weights[answer_start:]])
    images = tuple([image for image in prompt_from.images if image.end <= prompt_end])  # an answer has none
    no_logprobs = np.full(len(token_ids), np.nan, np.float32)
    return Row.from_arrays(token_ids, weights, no_logprobs, prompt_from.objective, images=images)


def last_run(mask: NDArray[np.bool_]) -> int:
    """Start index of the last run of True in `mask`."""
    import numpy as np

    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    return int(starts[-1])
