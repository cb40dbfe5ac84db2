"""Paired comparison of two policies on the same tasks: the difference and its uncertainty."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from statistics import fmean
from typing import Any

from .statistics import (
    cluster_sums,
    clustered_interval,
    degrees_of_freedom,
    interval_or_none,
    number_or_none,
    t_quantile,
)

ENUMERATED = 16
"""With at most this many differing clusters, all sign flips are enumerated."""
FLIPS = 20_000
"""Number of random sign flips with more clusters."""
POWER = 0.8
"""Probability of detecting the smallest detectable difference."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Policy B against policy A on the tasks with scores of both.

    `differences`: per task, B's mean minus A's. `mean`: the mean of these, with its 95% interval from `low` to `high`
    and standard error over `n_clusters` clusters. `p_value`: the probability of a mean at least as far from 0 if the
    policies were equal. `detectable`: the smallest true difference that such a comparison detects at 5% with
    probability `POWER`. `only_a` and `only_b`: numbers of tasks with scores of one policy only, which are ignored. NaN
    stands for a number that does not exist.
    """

    mean: float
    low: float
    high: float
    stderr: float
    p_value: float
    detectable: float
    n_clusters: int
    differences: Mapping[Any, float]
    only_a: int
    only_b: int

    @property
    def n(self) -> int:
        return len(self.differences)

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON, with None for NaN. `better`, `worse` and `equal` are numbers of tasks."""
        differences = self.differences.values()
        return {
            "difference": number_or_none(self.mean),
            "ci95": interval_or_none(self.low, self.high),
            "stderr": number_or_none(self.stderr),
            "p_value": number_or_none(self.p_value),
            "detectable": number_or_none(self.detectable),
            "n_tasks": self.n,
            "n_clusters": self.n_clusters,
            "better": sum(value > 0 for value in differences),
            "worse": sum(value < 0 for value in differences),
            "equal": sum(value == 0 for value in differences),
            "only_a": self.only_a,
            "only_b": self.only_b,
        }


def paired_difference(
    a: Mapping[str, Sequence[float]],
    b: Mapping[str, Sequence[float]],
    *,
    clusters: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Paired:
    """Compare two policies by the scores of each task's episodes under `a` and `b`.

    A task's repeats are averaged first; the sampling units are the tasks, or their `clusters`. Standard error and
    interval are those of `clustered_mean` of the differences: E. Miller, "Adding Error Bars to Evals" (2024), section
    4.2. If all clusters differ alike, and all scores are in [0, 1], the interval is `alike_interval` on [-1, 1], since
    a single point would claim certainty; with one cluster it is [-1, 1].

    The p-value is of the sign-flip test over clusters: under no difference, either sign is equally likely. It is exact
    for up to `ENUMERATED` differing clusters; else it is computed from `FLIPS` random flips drawn from `seed`,
    (1 + those as far from 0) / (1 + all): B. Phipson and G. K. Smyth, "Permutation p-values should never be
    zero" (2010). The smallest detectable difference is (t_0.975 + t_0.8) stderr, with the interval's degrees of
    freedom: J. M. Bland, "An Introduction to Medical Statistics", on sample sizes, with t in place of z. Raises
    `KeyError` for a shared task without a cluster.
    """
    means_a, means_b = _means(a), _means(b)
    differences = {task: _difference(value, means_b[task]) for task, value in means_a.items() if task in means_b}
    only_a, only_b = len(means_a) - len(differences), len(means_b) - len(differences)
    if not differences:
        nan = math.nan
        return Paired(nan, nan, nan, nan, nan, nan, 0, {}, only_a, only_b)
    mean = math.fsum(differences.values()) / len(differences)
    unit = all(0.0 <= score <= 1.0 for side in (a, b) for task in differences for score in side[task])
    deviations = cluster_sums({task: value - mean for task, value in differences.items()}, clusters)
    low, high, error, method = clustered_interval(mean, deviations, (-1.0, 1.0) if unit else None)
    detectable = math.nan
    if method == "t":
        df = degrees_of_freedom([size for _, size in deviations])
        detectable = (t_quantile(0.975, df) + t_quantile(POWER, df)) * error
    p_value = sign_flip([total for total, _ in cluster_sums(differences, clusters)], seed)
    return Paired(mean, low, high, error, p_value, detectable, len(deviations), differences, only_a, only_b)


def sign_flip(totals: Sequence[float], seed: int) -> float:
    """Two-sided p-value of the clusters' summed differences: the fraction of sign flips whose sum is at least as far
    from 0 (`paired_difference`). 1 if no cluster differs."""
    differing = [abs(total) for total in totals if total]
    total_size = math.fsum(differing)
    extreme = abs(math.fsum(totals)) - 1e-9 * total_size  # the same numbers summed in another order differ by rounding
    if len(differing) <= ENUMERATED:
        return fmean(abs(total) >= extreme for total in _signed_sums(differing))
    # Eight signs are one byte, an index into the sums of eight clusters: a thousand tasks take a fraction of a second.
    padded = differing + [0.0] * (-len(differing) % 8)
    tables = [_signed_sums(padded[start : start + 8]) for start in range(0, len(padded), 8)]
    rng = random.Random(seed)
    flips = (sum(map(getitem, tables, rng.randbytes(len(tables)))) for _ in range(FLIPS))
    return (1 + sum(abs(total) >= extreme for total in flips)) / (1 + FLIPS)


def _signed_sums(values: Sequence[float]) -> list[float]:
    """The sum of `values` under each choice of their signs, 2 ** len(values) of them."""
    sums = [0.0]
    for value in values:
        sums = [total + sign for total in sums for sign in (value, -value)]
    return sums


def _means(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: math.fsum(values) / len(values) for task, values in scores.items() if values}


def _difference(a: float, b: float) -> float:
    """b - a, and 0 if they differ by rounding alone."""
    return 0.0 if math.isclose(a, b, rel_tol=1e-12) else b - a
