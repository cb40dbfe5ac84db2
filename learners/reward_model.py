"""A reward model: one number per answer, higher for the answer that people chose.

Source: L. Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 1; the
margin H. Touvron et al., "Llama 2" (2023), eq. 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from envgym.learner import LearnerConfig, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Row

from .pairs import PairLearner, chosen_rejected_sums
from .settings import RewardModelConfig

if TYPE_CHECKING:
    from envgym.types.episodes import FloatArray

    from .losses import LossAndMetrics
    from .pairs import PairArray


class RewardModelLearner(PairLearner):
    """Trains the policy's model, with a scalar head, as a reward model. The reward is read at an answer's last token,
    which ends its turn."""

    Config: ClassVar[type[LearnerConfig]] = RewardModelConfig
    config: RewardModelConfig
    reads_outputs = True

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
        from .losses import pair_sums, ranking_loss

        chosen_rewards, rejected_rewards = pair_sums(outputs.values, batch)
        margin, _ = pair_sums(batch.arrays["margin"], batch)
        losses = ranking_loss(chosen_rewards - rejected_rewards, margin)
        n = float(len(losses))
        rewards = outputs.values.detach()[batch.loss_weights > 0]
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float((chosen_rewards > rejected_rewards).sum()), n),
            "preference/margin": (float((chosen_rewards - rejected_rewards).detach().sum()), n),
            "preference/reward_mean": (float(rewards.sum()), 2 * n),
        }
        return losses.sum() / normalizers[batch.objective], metrics

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`, `eval/accuracy` (share of pairs ranked correctly), `eval/margin` (their mean reward difference)
        and the rewards' mean and standard deviation."""
        import numpy as np
        import torch

        from .losses import ranking_loss

        chosen_rewards, rejected_rewards = chosen_rejected_sums(rows, outputs)
        margin, _ = chosen_rejected_sums(rows, [row.arrays["margin"] for row in rows])
        losses = ranking_loss(torch.from_numpy(chosen_rewards - rejected_rewards), torch.from_numpy(margin))
        rewards = np.concatenate([chosen_rewards, rejected_rewards])
        self._observe_rewards(rewards, is_held_out=True)
        return {
            "eval/loss": float(losses.mean()),
            "eval/accuracy": float((chosen_rewards > rejected_rewards).mean()),
            "eval/margin": float((chosen_rewards - rejected_rewards).mean()),
            "eval/reward_mean": float(rewards.mean()),
            "eval/reward_std": float(rewards.std()),
        }

    def end_step(self, rows: Sequence[Row]) -> None:
        import numpy as np

        rewards = [row.first_outputs[row.loss_weights > 0] for row in rows if row.first_outputs is not None]
        if rewards and not self._is_held_out:
            self._observe_rewards(np.concatenate(rewards).astype(np.float64), is_held_out=False)

    def _observe_rewards(self, rewards: PairArray, *, is_held_out: bool) -> None:
        self._statistics, self._is_held_out = {"mean": float(rewards.mean()), "std": float(rewards.std())}, is_held_out

    def model_config_extras(self) -> Mapping[str, Any]:
        """`mean` and `std` of the rewards of held-out answers or, without an evaluation, of the last training step, for
        normalising rewards."""
        return self._statistics

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self._statistics, "held_out": self._is_held_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics, self._is_held_out = dict(state["statistics"]), bool(state["held_out"])
