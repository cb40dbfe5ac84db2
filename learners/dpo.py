"""DPO: the policy is trained on preferences without a reward model; settings make it IPO or cDPO.

Sources: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023);
M. G. Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), for IPO; E.
Mitchell, "A note on DPO with noisy preferences" (2023), for label smoothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import LearnerConfig, Outputs, RoleSpec, RowBatch
from envgym.types import Row

from .pairs import PairLearner
from .settings import DPOConfig

if TYPE_CHECKING:
    from .losses import LossAndMetrics


class DPO(PairLearner):
    """Direct preference optimisation, on recorded pairs or on the best and the worst of sampled groups."""

    Config: ClassVar[type[LearnerConfig]] = DPOConfig
    config: DPOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False), "reference": RoleSpec()}

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        answers = [row for row in rows if "chosen" in row.arrays and row.arrays["chosen"][0]]
        weight = sum(float(row.loss_weights.sum()) for row in answers)
        return super().loss_normalizers(rows) | {"nll": max(1e-8, weight)}

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from .losses import dpo_loss, nll_of_chosen, pair_sums

        policy = pair_sums(outputs.logprobs, batch)
        reference = pair_sums(batch.arrays["reference"], batch)
        chosen_rewards, rejected_rewards = (self.config.beta * (p - r) for p, r in zip(policy, reference, strict=True))
        losses = dpo_loss(chosen_rewards - rejected_rewards, self.config)
        n = float(len(losses))
        total = losses.sum() / normalizers[batch.objective]
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float((chosen_rewards > rejected_rewards).sum()), n),
            "preference/margin": (float((chosen_rewards - rejected_rewards).detach().sum()), n),
            "reward/chosen": (float(chosen_rewards.detach().sum()), n),
            "reward/rejected": (float(rejected_rewards.detach().sum()), n),
        }
        if self.config.nll_coef:
            nll, weight = nll_of_chosen(outputs.logprobs, batch)
            total = total + self.config.nll_coef * nll / normalizers["nll"]
            metrics["nll"] = (float(nll.detach()), weight)
        return total, metrics
