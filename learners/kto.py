"""KTO: answers that are each labelled good or bad, without pairs.

Source: K. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, LearnerConfig, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory
from envgym.types import Objective

from .settings import KTOConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from envgym.learner import FloatArray

    from .losses import LossAndMetrics


class KTO(Learner):
    """Kahneman-Tversky optimisation. An episode is good if its reward is above one half.

    The KL baseline z is the mean log-ratio to the reference model over mismatched samples: each prompt with the answer
    of the previous episode of the training step, the first prompt with the last answer. It is computed before the
    step's updates, so that it does not depend on micro-batches and ranks.
    """

    Config: ClassVar[type[LearnerConfig]] = KTOConfig
    config: KTOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        return {"actor": RoleSpec(trained=True, scored=True), "reference": RoleSpec()}

    def samples_to_score(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        """The episodes' samples and, for the KL baseline, a mismatched sample per episode as its `extra`."""
        members = [trajectory for group in groups for trajectory in group]
        for trajectory, previous in zip(members, [members[-1], *members[:-1]], strict=True):
            trajectory.extra = [mismatched_sample(prompt_from=trajectory.samples[0], answer_from=previous.samples[0])]
        return super().samples_to_score(groups)

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        """Mark each sample as good or bad, and add the KL baseline: the mean log ratio of the mismatched samples."""
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

    def loss_normalizers(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        episodes = {sample.episode_index for sample in samples if sample.objective == Objective.LABEL}
        return super().loss_normalizers(samples) | {Objective.LABEL: max(1.0, float(len(episodes)))}

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        from .losses import kto_loss, unit_constants, unit_sums

        log_ratios = unit_sums(outputs.logprobs, batch) - unit_sums(batch.arrays["reference"], batch)
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

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """`eval/loss`; `eval/accuracy`, the share of answers whose log-ratio is above the KL baseline if good and below
        it if bad; and, given answers of both kinds, `eval/margin`, the mean log-ratio of good answers minus that of bad
        ones, in nats times `beta`."""
        import numpy as np
        import torch

        from .losses import kto_loss

        by_episode: dict[int, float] = {}
        constants = {}
        for sample, output in zip(samples, outputs, strict=True):
            log_ratio = weighted_sum(sample, output - sample.arrays["reference"])
            by_episode[sample.episode_index] = by_episode.get(sample.episode_index, 0.0) + log_ratio
            constants[sample.episode_index] = sample.arrays["good"][0], sample.arrays["baseline"][0]
        log_ratios = torch.tensor(list(by_episode.values()), dtype=torch.float64)
        labels, baseline = torch.tensor(np.array(list(constants.values()), np.float64)).T
        losses = kto_loss(log_ratios, baseline, labels > 0, self.config)
        right = (log_ratios > baseline) == (labels > 0)
        metrics = {"eval/loss": float(losses.mean()), "eval/accuracy": float(right.double().mean())}
        if labels.any() and not labels.all():
            margin = log_ratios[labels > 0].mean() - log_ratios[labels == 0].mean()
            metrics["eval/margin"] = self.config.beta * float(margin)
        return metrics


def weighted_sum(sample: TrainSample, values: FloatArray) -> float:
    """The weighted sum of `values` [T] over the tokens of positive weight."""
    import numpy as np

    counts = sample.loss_weights > 0
    return float(sample.loss_weights[counts].astype(np.float64) @ values[counts])


def mismatched_sample(prompt_from: TrainSample, answer_from: TrainSample) -> TrainSample:
    """A sample to score: the prompt of one episode followed by the last answer of another."""
    import numpy as np

    prompt_end, answer_start = (last_run(sample.loss_weights > 0) for sample in (prompt_from, answer_from))
    token_ids = np.concatenate([prompt_from.token_ids[:prompt_end], answer_from.token_ids[answer_start:]])
    weights = np.concatenate([np.zeros(prompt_end, np.float32), answer_from.loss_weights[answer_start:]])
    unsampled = np.full(len(token_ids), np.nan, np.float32)
    return replace(
        prompt_from, token_ids=token_ids, loss_weights=weights, old_logprobs=unsampled, temperatures=None, arrays={}
    )


def last_run(mask: NDArray[np.bool_]) -> int:
    """Start index of the last run of True in `mask`."""
    import numpy as np

    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    return int(starts[-1])
