"""A reward model: one number per answer, higher for the answer that people chose.

Source: L. Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 1; the
margin H. Touvron et al., "Llama 2" (2023), eq. 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from envgym.learner import LearnerConfig, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory

from .pairs import PairLearner, chosen_rejected_sums
from .settings import RewardModelConfig

if TYPE_CHECKING:
    from envgym.learner import FloatArray

    from .losses import LossAndMetrics


class RewardModelLearner(PairLearner):
    """Trains the policy's model, with a scalar head, as a reward model. The reward is read at an answer's last token,
    which ends its turn."""

    Config: ClassVar[type[LearnerConfig]] = RewardModelConfig
    config: RewardModelConfig

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(config)
        self._statistics: dict[str, float] = {}
        self._is_held_out = False

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False, head="scalar")}

    def samples_of(self, trajectory: Trajectory) -> list[TrainSample]:
        import numpy as np

        last = trajectory.samples[-1]
        weights = np.zeros_like(last.loss_weights)
        weights[-1] = 1.0
        margin = float(trajectory.episode.metrics.get("margin", 0.0)) if self.config.margin else 0.0
        arrays = {**last.arrays, "margin": np.full(len(weights), margin, np.float32)}
        return [replace(last, loss_weights=weights, arrays=arrays)]

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
            "preference/reward_mean_square": (float(rewards.square().sum()), 2 * n),
        }
        return losses.sum() / normalizers[batch.objective], metrics

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`, `eval/accuracy` (share of pairs ranked correctly), `eval/margin` (their mean reward difference)
        and the rewards' mean and standard deviation."""
        import numpy as np
        import torch

        from .losses import ranking_loss

        chosen_rewards, rejected_rewards = chosen_rejected_sums(samples, outputs)
        margin, _ = chosen_rejected_sums(samples, [sample.arrays["margin"] for sample in samples])
        losses = ranking_loss(torch.from_numpy(chosen_rewards - rejected_rewards), torch.from_numpy(margin))
        rewards = np.concatenate([chosen_rewards, rejected_rewards])
        self._statistics, self._is_held_out = {"mean": float(rewards.mean()), "std": float(rewards.std())}, True
        return {
            "eval/loss": float(losses.mean()),
            "eval/accuracy": float((chosen_rewards > rejected_rewards).mean()),
            "eval/margin": float((chosen_rewards - rejected_rewards).mean()),
            "eval/reward_mean": float(rewards.mean()),
            "eval/reward_std": float(rewards.std()),
        }

    def on_step_end(self, record: Mapping[str, Any]) -> None:
        if not self._is_held_out:
            mean = record["preference/reward_mean"]
            variance = max(0.0, record["preference/reward_mean_square"] - mean * mean)
            self._statistics = {"mean": mean, "std": variance**0.5}

    def model_config_extras(self) -> Mapping[str, Any]:
        """`mean` and `std` of the rewards of held-out answers or, without an evaluation, of the last training step, for
        normalising rewards."""
        return self._statistics

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self._statistics, "held_out": self._is_held_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics, self._is_held_out = dict(state["statistics"]), bool(state["held_out"])
