"""A reward model: one number per answer, higher for the answer that people chose.

Source: L. Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 1; the
margin H. Touvron et al., "Llama 2" (2023), eq. 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envgym.learner import LearnerConfig, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Row

from .pairs import PairLearner, pair_metrics, pair_sums

if TYPE_CHECKING:
    from torch import Tensor

    from envgym.types.episodes import FloatArray


class RewardModelConfig(LearnerConfig):
    """Settings of a reward model."""

    margin: bool = False
    """Require the chosen answer's reward to be higher by the pair's `margin`, a field of the data."""


class RewardModelLearner(PairLearner):
    """Trains the policy's model, with a scalar head, as a reward model. The reward is read at an answer's last token,
    which ends its turn."""

    Config = RewardModelConfig
    config: RewardModelConfig

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(config)
        self._statistics: dict[str, float] = {}
        self._is_held_out = False

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False, head="scalar")}

    def rows_of(self, episode: Episode) -> list[Row]:
        import numpy as np

        last = episode.rows[-1]
        weights = np.zeros_like(last.loss_weights)
        weights[-1] = 1.0
        margin = float(episode.metrics.get("margin", 0.0)) if self.config.margin else 0.0
        last.arrays["margin"] = np.full(len(weights), margin, np.float32)
        return [last.copy_with(loss_weights=weights)]

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        chosen_rewards, rejected_rewards = pair_sums(outputs.values, batch)
        margin, _ = pair_sums(batch.arrays["margin"], batch)
        losses = ranking_loss(chosen_rewards - rejected_rewards, margin)
        metrics = pair_metrics(losses, chosen_rewards, rejected_rewards)
        rewards = outputs.values.detach()[batch.loss_weights > 0]
        metrics["preference/reward_mean"] = (float(rewards.sum()), 2.0 * len(losses))
        return losses.sum() / normalizers[batch.objective], metrics

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Besides the metrics of pairs, mean and standard deviation of the rewards."""
        self._observe_rewards(zip(rows, outputs, strict=True))
        self._is_held_out = True
        return super().evaluate(rows, outputs) | {
            f"eval/reward_{name}": value for name, value in self._statistics.items()
        }

    def end_step(self, rows: Sequence[Row]) -> None:
        passed = [(row, row.first_outputs) for row in rows if row.first_outputs is not None]
        if passed and not self._is_held_out:
            self._observe_rewards(passed)

    def _observe_rewards(self, rows: Iterable[tuple[Row, FloatArray]]) -> None:
        import numpy as np

        rewards = np.concatenate([outputs[row.loss_weights > 0] for row, outputs in rows]).astype(np.float64)
        self._statistics = {"mean": float(rewards.mean()), "std": float(rewards.std())}

    def model_config_extras(self) -> Mapping[str, Any]:
        """`mean` and `std` of the rewards of held-out answers or, without an evaluation, of the last training step, for
        normalising rewards."""
        return self._statistics

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self._statistics, "held_out": self._is_held_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics, self._is_held_out = dict(state["statistics"]), bool(state["held_out"])


def ranking_loss(difference: Tensor, margin: Tensor) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin), the shape of `difference`.

    Source: L. Ouyang et al. (2022), eq. 1; the margin H. Touvron et al., "Llama 2" (2023), eq. 2. Without a margin it
    is log(1 + exp(r_rejected - r_chosen)).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(difference - margin)
