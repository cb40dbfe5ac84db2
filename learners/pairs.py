"""Pairs of a chosen and a rejected answer to one task, which DPO and reward models are trained on.

A recorded preference is a group of two with rewards 1 and 0; in a sampled group the best and the worst answer form a
pair. So one learner serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from envgym.learner import Learner, TrainSample, Trajectory
from envgym.types import Objective

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from envgym.learner import FloatArray

    PairArray = NDArray[np.float64]

Pair = tuple[Trajectory, Trajectory]
"""The chosen trajectory and the rejected one."""


class PairLearner(Learner):
    """Base of learners on pairs. Their loss is a mean over the pairs of the optimizer step.

    A pair is a unit of the micro-batch. `arrays["chosen"]` is 1 at every token of its chosen samples, 0 at those of the
    rejected ones. Pairs of identical answers, such as answers truncated before they differ, are left out.
    """

    min_group_size: ClassVar[int] = 2
    _n_identical = 0

    def samples_to_score(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        samples = super().samples_to_score(groups)
        for sample in samples:
            sample.drop_sampling_info()
        return samples

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        import numpy as np

        pairs, samples = best_and_worst(groups), []
        distinct = [pair for pair in pairs if _token_ids(pair[0]) != _token_ids(pair[1])]
        self._n_identical = len(pairs) - len(distinct)
        for unit, pair in enumerate(distinct or pairs):  # a step of nothing else has a loss without a gradient
            for trajectory, label in zip(pair, (1.0, 0.0), strict=True):
                for sample in self.samples_of(trajectory):
                    sample.objective, sample.microbatch_key = Objective.PREFERENCE, unit
                    sample.arrays["chosen"] = np.full(len(sample), label, np.float32)
                    samples.append(sample)
        return samples

    def samples_of(self, trajectory: Trajectory) -> list[TrainSample]:
        """The samples of one side of a pair."""
        return trajectory.samples

    def loss_normalizers(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        units = {sample.microbatch_key for sample in samples if sample.objective == Objective.PREFERENCE}
        return super().loss_normalizers(samples) | {Objective.PREFERENCE: max(1.0, float(len(units)))}

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        identical = {"preference/identical": float(self._n_identical)} if self._n_identical else {}
        return {"preference/pairs": self.loss_normalizers(samples)[Objective.PREFERENCE], **identical}


def _token_ids(trajectory: Trajectory) -> list[list[int]]:
    """The tokens of an answer and its prompt: those of two answers may be equal after they were truncated."""
    return [sample.token_ids.tolist() for sample in trajectory.samples]


def best_and_worst(groups: Sequence[Sequence[Trajectory]]) -> list[Pair]:
    """The best and the worst of each group by reward, the first among equals; no pair if all rewards are equal."""
    pairs = []
    for group in groups:
        rewards = {i: member.episode.reward for i, member in enumerate(group) if member.episode.reward is not None}
        if len(set(rewards.values())) > 1:
            best, worst = (pick(rewards, key=lambda index: rewards[index]) for pick in (max, min))
            pairs.append((group[best], group[worst]))
    return pairs


def chosen_rejected_sums(samples: Sequence[TrainSample], values: Sequence[FloatArray]) -> tuple[PairArray, PairArray]:
    """[n pairs] each: sums of `values` ([T] per sample) over the chosen and over the rejected answers' tokens of
    positive weight."""
    import numpy as np

    by_pair: dict[int, list[float]] = {}
    for sample, array in zip(samples, values, strict=True):
        totals = by_pair.setdefault(sample.microbatch_key, [0.0, 0.0])
        totals[int(sample.arrays["chosen"][0])] += float(array[sample.loss_weights > 0].sum(dtype=np.float64))
    rejected_sums, chosen_sums = np.array(list(by_pair.values())).reshape(-1, 2).T
    return chosen_sums, rejected_sums
