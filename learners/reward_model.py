"""A reward model: one number for an answer, higher for the one that people chose.

Source: L. Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 1; the
margin H. Touvron et al., "Llama 2" (2023), eq. 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from envgym.learner import LearnerConfig, Metrics, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory

from .pairs import PairLearner, sums
from .settings import RewardModelConfig

if TYPE_CHECKING:
    import torch

    from envgym.learner import FloatArray


class RewardModel(PairLearner):
    """Trains the policy's model, with a scalar head, as a reward model. The reward is read at an answer's last token,
    the one that ends its turn."""

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

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        from .losses import pair_sums, ranking_loss

        chosen, rejected = pair_sums(outputs.values, batch)
        margin, _ = pair_sums(batch.arrays["margin"], batch)
        losses = ranking_loss(chosen - rejected, margin)
        n = float(len(losses))
        rewards = outputs.values.detach()[batch.loss_weights > 0]
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float((chosen > rejected).sum()), n),
            "preference/margin": (float((chosen - rejected).detach().sum()), n),
            "preference/reward_mean": (float(rewards.sum()), 2 * n),
            "preference/reward_mean_square": (float(rewards.square().sum()), 2 * n),
        }
        return losses.sum() / denominators[batch.objective], metrics

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`, `eval/accuracy` (share of pairs ranked right), `eval/margin` (the mean difference of their
        rewards) and the rewards' mean and standard deviation."""
        import numpy as np
        import torch

        from .losses import ranking_loss

        chosen, rejected = sums(samples, outputs)
        margin, _ = sums(samples, [sample.arrays["margin"] for sample in samples])
        rewards = np.concatenate([chosen, rejected])
        self._statistics, self._is_held_out = {"mean": float(rewards.mean()), "std": float(rewards.std())}, True
        return {
            "eval/loss": float(ranking_loss(torch.from_numpy(chosen - rejected), torch.from_numpy(margin)).mean()),
            "eval/accuracy": float((chosen > rejected).mean()),
            "eval/margin": float((chosen - rejected).mean()),
            "eval/reward_mean": float(rewards.mean()),
            "eval/reward_std": float(rewards.std()),
        }

    def observe(self, record: Mapping[str, Any]) -> None:
        if not self._is_held_out:
            mean = record["preference/reward_mean"]
            variance = max(0.0, record["preference/reward_mean_square"] - mean * mean)
            self._statistics = {"mean": mean, "std": variance**0.5}

    def description(self) -> Mapping[str, Any]:
        """`mean` and `std` of the rewards of held-out answers or, without an evaluation, of the last step's: what
        normalised rewards are brought to 0 and 1 by."""
        return self._statistics

    def state(self) -> dict[str, Any]:
        return {"statistics": self._statistics, "held_out": self._is_held_out}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._statistics, self._is_held_out = dict(state["statistics"]), bool(state["held_out"])
