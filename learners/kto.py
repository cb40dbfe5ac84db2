"""KTO: answers that are each called good or bad, without pairs.

Source: K. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, LearnerConfig, Metrics, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory
from envgym.types import Objective

from .settings import KTOConfig

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from envgym.learner import FloatArray


class KTO(Learner):
    """Kahneman-Tversky optimisation. An episode is good if its reward is above one half.

    Its point of reference is how far the policy has moved from the reference model on answers to other prompts: each
    prompt with the answer of the episode before it, in the order of the step, the first with the last. It is measured
    before the step's updates and is the same whatever micro-batches and ranks there are.
    """

    Config: ClassVar[type[LearnerConfig]] = KTOConfig
    config: KTOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=True), "reference": RoleSpec()}

    def to_score(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        """The episodes' samples and, for the point of reference, a mismatched one of each episode as its `extra`."""
        members = [trajectory for group in groups for trajectory in group]
        for trajectory, before in zip(members, [members[-1], *members[:-1]], strict=True):
            trajectory.extra = [mismatched(trajectory.samples[0], before.samples[0])]
        return super().to_score(groups)

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        import numpy as np

        members = [trajectory for group in groups for trajectory in group]
        extras = [sample for trajectory in members for sample in trajectory.extra]
        log_ratios = [weighted_sum(extra, extra.arrays["actor"] - extra.arrays["reference"]) for extra in extras]
        baseline = max(0.0, float(np.mean(log_ratios)))
        samples = []
        for trajectory in members:
            assert trajectory.episode.reward is not None, "a labelled answer has a reward"
            constants = {"good": float(trajectory.episode.reward > 0.5), "baseline": baseline}
            for sample in trajectory.samples:
                sample.objective = Objective.LABEL
                sample.arrays |= {k: np.full(len(sample), v, np.float32) for k, v in constants.items()}
                del sample.arrays["actor"]
                samples.append(sample)
        return samples

    def denominators(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        episodes = {sample.episode for sample in samples if sample.objective == Objective.LABEL}
        return super().denominators(samples) | {Objective.LABEL: max(1.0, float(len(episodes)))}

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        from .losses import kto_loss, unit_constants, unit_sums

        moved = unit_sums(outputs.logprobs, batch) - unit_sums(batch.arrays["reference"], batch)
        good, baseline = unit_constants("good", batch), unit_constants("baseline", batch)
        losses = kto_loss(moved, baseline, good > 0, self.config)
        right = (moved.detach() > baseline) == (good > 0)
        rewards, n, n_good = self.config.beta * moved.detach(), float(len(losses)), float(good.sum())
        metrics = {
            "loss": (float(losses.detach().sum()), n),
            "preference/accuracy": (float(right.sum()), n),
            "reward/good": (float((rewards * good).sum()), n_good),
            "reward/bad": (float((rewards * (1 - good)).sum()), n - n_good),
            "policy/kl": (float(baseline.sum()), n),
        }
        return losses.sum() / denominators[batch.objective], metrics

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/accuracy`: the share of answers whose likelihood has moved the right way from the reference, by more or
        by less than the point of reference; `eval/loss`; and, where there are both, `eval/margin`: by how much more the
        good ones have moved than the bad ones, in nats times `beta`."""
        import numpy as np
        import torch

        from .losses import kto_loss

        by_episode: dict[int, float] = {}
        constants = {}
        for sample, output in zip(samples, outputs, strict=True):
            log_ratio = weighted_sum(sample, output - sample.arrays["reference"])
            by_episode[sample.episode] = by_episode.get(sample.episode, 0.0) + log_ratio
            constants[sample.episode] = sample.arrays["good"][0], sample.arrays["baseline"][0]
        log_ratios = torch.tensor(list(by_episode.values()), dtype=torch.float64)
        good, baseline = torch.tensor(np.array(list(constants.values()), np.float64)).T
        losses = kto_loss(log_ratios, baseline, good > 0, self.config)
        right = (log_ratios > baseline) == (good > 0)
        metrics = {"eval/loss": float(losses.mean()), "eval/accuracy": float(right.double().mean())}
        if good.any() and not good.all():
            margin = log_ratios[good > 0].mean() - log_ratios[good == 0].mean()
            metrics["eval/margin"] = self.config.beta * float(margin)
        return metrics


def weighted_sum(sample: TrainSample, values: FloatArray) -> float:
    """The weighted sum of `values`, [T], over the tokens that count."""
    import numpy as np

    counts = sample.loss_weights > 0
    return float(sample.loss_weights[counts].astype(np.float64) @ values[counts])


def mismatched(asks: TrainSample, answers: TrainSample) -> TrainSample:
    """A prompt, and the last answer of another episode behind it, as a sample to score."""
    import numpy as np

    prompt, answer = (last_run(sample.loss_weights > 0) for sample in (asks, answers))
    token_ids = np.concatenate([asks.token_ids[:prompt], answers.token_ids[answer:]])
    weights = np.concatenate([np.zeros(prompt, np.float32), answers.loss_weights[answer:]])
    return replace(
        asks,
        token_ids=token_ids,
        loss_weights=weights,
        old_logprobs=np.full(len(token_ids), np.nan, np.float32),
        temperatures=None,
        arrays={},
    )


def last_run(counts: NDArray[np.bool_]) -> int:
    """Index at which the last run of tokens that count begins."""
    import numpy as np

    starts = np.flatnonzero(counts & ~np.concatenate([[False], counts[:-1]]))
    return int(starts[-1])
