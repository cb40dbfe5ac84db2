"""The statistics an evaluation reports. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over clusters of scores with its 95% interval. `n` counts clusters (tasks)."""

    score: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, object]:
        """For JSON, which knows no NaN: None stands for what there is no number for."""
        if self.n == 0:
            return {"score": None, "ci95": None, "n_tasks": 0}
        return {"score": self.score, "ci95": [self.low, self.high], "n_tasks": self.n}


def clustered_mean(scores: Mapping[str, Sequence[float]]) -> Mean:
    """Mean of task means with a 95% interval; `scores` maps a task's id to the scores of its episodes.

    Repeats of a task are averaged first, so the tasks are what varies. The interval is the t interval with
    n - 1 degrees of freedom over the task means, kept inside [0, 1] where all scores are; with every mean equal
    (all solved, say) it is Wilson's, which does not shrink to a point. Source: E. Miller, "Adding Error Bars to
    Evals" (2024), section 2. NaN without tasks.
    """
    means = [math.fsum(values) / len(values) for values in scores.values() if values]
    n = len(means)
    if n == 0:
        return Mean(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(means) / n
    in_unit = all(0.0 <= score <= 1.0 for values in scores.values() for score in values)
    if len(set(means)) == 1:
        low, high = wilson_interval(mean, n) if in_unit else (mean, mean)
        return Mean(mean, low, high, n)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in means) / (n - 1) / n)
    low, high = mean - t_quantile_975(n - 1) * error, mean + t_quantile_975(n - 1) * error
    if in_unit:
        low, high = max(low, 0.0), min(high, 1.0)
    return Mean(mean, low, high, n)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95% interval of a share of n trials. Source: E. B. Wilson (1927), without continuity correction."""
    z = 1.959963984540054
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@lru_cache(maxsize=256)
def t_quantile_975(df: int) -> float:
    """97.5% quantile of Student's t with `df` degrees of freedom, to 1e-6, by bisection on the integrated density."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def mass(x: float) -> float:  # P(0 < T < x) by Simpson's rule, in the angle where the tail is tame
        # With t = sqrt(df) tan(a) the density becomes cos(a)^(df - 1), smooth on a finite range.
        steps, end = 2000, math.atan(x / math.sqrt(df))
        width = end / steps
        total = 1.0 + math.cos(end) ** (df - 1)
        total += sum((4 if i % 2 else 2) * math.cos(i * width) ** (df - 1) for i in range(1, steps))
        return scale * math.sqrt(df) * total * width / 3

    low, high = 1.9, 13.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < 0.475 else (low, middle)
    return (low + high) / 2
