"""Baselines from the rewards of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_of(rewards: Sequence[float]) -> float:
    """The mean, exactly theirs where all are equal: one that is off by a bit would make an advantage of nothing."""
    if len(set(rewards)) == 1:
        return rewards[0]
    try:
        return math.fsum(rewards) / len(rewards)
    except OverflowError:  # of the sum, which the mean is not as large as
        return math.fsum(reward / len(rewards) for reward in rewards)


def centred(values: Sequence[float], rewards: Sequence[float]) -> list[float]:
    """v - mean of the group's rewards; exactly 0 for values that are all the rewards there are."""
    mean = mean_of(rewards)
    return [value - mean for value in values]
