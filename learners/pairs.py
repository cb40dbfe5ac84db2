"""Pairs of answers to one task, the chosen and the rejected, which DPO and reward models learn from.

A recorded preference is a group of two, of rewards 1 and 0; of a sampled group the best and the worst make a pair. So
one learner serves both.
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

    Numbers = NDArray[np.float64]

Pair = tuple[Trajectory, Trajectory]
"""The chosen trajectory and the rejected one."""


class PairLearner(Learner):
    """Base of the learners from pairs, whose loss is a mean over the pairs of the optimizer step.

    A pair is a batch unit. `arrays["chosen"]` is 1 at every token of its chosen samples and 0 at those of the rejected.
    """

    min_group_size: ClassVar[int] = 2

    def to_score(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        samples = super().to_score(groups)
        for sample in samples:
            sample.unsample()
        return samples

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        import numpy as np

        samples = []
        for unit, pair in enumerate(best_and_worst(groups)):
            for trajectory, chosen in zip(pair, (1.0, 0.0), strict=True):
                for sample in self.samples_of(trajectory):
                    sample.objective, sample.batch_unit = Objective.PREFERENCE, unit
                    sample.arrays["chosen"] = np.full(len(sample), chosen, np.float32)
                    samples.append(sample)
        return samples

    def samples_of(self, trajectory: Trajectory) -> list[TrainSample]:
        """The samples of one side of a pair."""
        return trajectory.samples

    def denominators(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        units = {sample.batch_unit for sample in samples if sample.objective == Objective.PREFERENCE}
        return super().denominators(samples) | {Objective.PREFERENCE: max(1.0, float(len(units)))}

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        return {"preference/pairs": self.denominators(samples)[Objective.PREFERENCE]}


def best_and_worst(groups: Sequence[Sequence[Trajectory]]) -> list[Pair]:
    """The best and the worst of each group by reward, the first of equals; none of a group whose rewards are equal."""
    found = []
    for group in groups:
        rewards = {index: one.episode.reward for index, one in enumerate(group) if one.episode.reward is not None}
        if len(set(rewards.values())) > 1:
            best, worst = (pick(rewards, key=lambda index: rewards[index]) for pick in (max, min))
            found.append((group[best], group[worst]))
    return found


def sums(samples: Sequence[TrainSample], values: Sequence[FloatArray]) -> tuple[Numbers, Numbers]:
    """[n pairs] each: sums of `values`, [T] a sample, over the tokens that count of the chosen and of the rejected."""
    import numpy as np

    by_unit: dict[int, list[float]] = {}
    for sample, of_tokens in zip(samples, values, strict=True):
        of_pair = by_unit.setdefault(sample.batch_unit, [0.0, 0.0])
        of_pair[int(sample.arrays["chosen"][0])] += float(of_tokens[sample.loss_weights > 0].sum(dtype=np.float64))
    rejected, chosen = np.array(list(by_unit.values())).reshape(-1, 2).T
    return chosen, rejected
