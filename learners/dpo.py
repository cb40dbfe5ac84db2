"""DPO: the policy learns what people preferred without a reward model between them; its settings make it IPO and cDPO.

Sources: R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (2023);
M. G. Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023), for IPO; E.
Mitchell, "A note on DPO with noisy preferences" (2023), for label smoothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import LearnerConfig, Metrics, Outputs, RoleSpec, RowBatch, TrainSample

from .pairs import PairLearner, sums
from .settings import DPOConfig

if TYPE_CHECKING:
    import torch

    from envgym.learner import FloatArray


class DPO(PairLearner):
    """Direct preference optimisation, on recorded pairs or on the best and the worst of sampled groups."""

    Config: ClassVar[type[LearnerConfig]] = DPOConfig
    config: DPOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=False), "reference": RoleSpec()}

    def denominators(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        chosen = [sample for sample in samples if "chosen" in sample.arrays and sample.arrays["chosen"][0]]
        weight = sum(float(sample.loss_weights.sum()) for sample in chosen)
        return super().denominators(samples) | {"nll": max(1e-8, weight)}

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        from .losses import dpo_loss, nll_of_chosen, pair_sums

        policy = pair_sums(outputs.logprobs, batch)
        reference = pair_sums(batch.arrays["reference"], batch)
        chosen, rejected = (self.config.beta * (own - base) for own, base in zip(policy, reference, strict=True))
        losses = dpo_loss(chosen - rejected, self.config)
        n = float(len(losses))
        total = losses.sum() / denominators[batch.objective]
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float((chosen > rejected).sum()), n),
            "preference/margin": (float((chosen - rejected).detach().sum()), n),
            "reward/chosen": (float(chosen.detach().sum()), n),
            "reward/rejected": (float(rejected.detach().sum()), n),
        }
        if self.config.nll_coef:
            nll, weight = nll_of_chosen(outputs.logprobs, batch)
            total = total + self.config.nll_coef * nll / denominators["nll"]
            metrics["nll"] = (float(nll.detach()), weight)
        return total, metrics

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`, `eval/accuracy`, the share of pairs whose chosen answer the policy has come to prefer, and
        `eval/margin`, how much, in nats times `beta`."""
        import torch

        from .losses import dpo_loss

        policy, reference = sums(samples, outputs), sums(samples, [s.arrays["reference"] for s in samples])
        chosen, rejected = (self.config.beta * (own - base) for own, base in zip(policy, reference, strict=True))
        margins = torch.from_numpy(chosen - rejected)
        return {
            "eval/loss": float(dpo_loss(margins, self.config).mean()),
            "eval/accuracy": float((margins > 0).double().mean()),
            "eval/margin": float(margins.mean()),
        }
