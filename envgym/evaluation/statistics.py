"""The statistics an evaluation reports. Pure functions of numbers."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from statistics import fmean
from typing import Literal

Method = Literal["t", "wilson", "mover", "none"]

MAJORITY_DRAWS = 400
"""Subsets of a task's episodes that are drawn where there are more (`majority_at_k`)."""


def number_or_none(number: float) -> float | None:
    """The number, or None for NaN, which JSON does not have."""
    return None if math.isnan(number) else number


def interval_or_none(low: float, high: float) -> list[float] | None:
    return None if math.isnan(low) or math.isnan(high) else [low, high]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `n` tasks with its 95% interval from `low` to `high`.

    `stderr` is the standard error over the `n_clusters` clusters; `method` names the interval's method: Student's `t`,
    `wilson`, `mover` (for a suite), or `none` if the spread of clusters is unknown. NaN stands for a number that does
    not exist: the error of a single cluster, and every number without tasks.
    """

    score: float
    low: float
    high: float
    n: int
    stderr: float
    n_clusters: int
    method: Method

    def as_dict(self) -> dict[str, object]:
        """The result for JSON, with None for NaN."""
        return {
            "score": number_or_none(self.score),
            "ci95": interval_or_none(self.low, self.high),
            "stderr": number_or_none(self.stderr),
            "n_tasks": self.n,
        }


def clustered_mean(scores: Mapping[str, Sequence[float]], clusters: Mapping[str, str] | None = None) -> Mean:
    """Mean of task means with a 95% interval; `scores` maps a task's id to the scores of its episodes.

    Repeats of a task are averaged first, so tasks are the sampling units. `clusters` maps every task to its cluster, if
    tasks are related (questions on one text); without it each task is a cluster. With n tasks in C clusters
    the standard error is that of E. Miller, "Adding Error Bars to Evals" (2024), section 2.2, with the factor
    C / (C - 1) for few clusters:

        sqrt(C / (C - 1) * sum over clusters of (sum over its tasks of (task mean - mean))^2) / n

    The interval is Wilson's if tasks are trials: every score is 0 or 1, one per task, and each task is a cluster.
    Otherwise it is Student's t around the mean, mean -+ t stderr (`degrees_of_freedom`). For scores in [0, 1]
    it has Wilson's form, in which the standard error estimated at the mean m becomes stderr
    sqrt(x (1 - x) / (m (1 - m))) at x: the same to two digits for many tasks, inside [0, 1], and near its ends, where
    good policies are, wide enough (E. L. Korn and B. I. Graubard, "Confidence intervals for proportions with small
    expected number of positive counts" (1998), on shares from clustered samples; N. Dean and M. Pagano, "Evaluating
    confidence interval methods for binomial proportions in clustered surveys" (2015)).

    If all clusters have the same mean, the interval for scores in [0, 1] is `alike_interval`. With a single cluster it
    is all of [0, 1], with `method` "none". Neither case has an interval if scores have no known range. NaN without
    tasks. Raises `KeyError` for a task without a cluster.
    """
    means = {task: math.fsum(values) / len(values) for task, values in scores.items() if values}
    n = len(means)
    if n == 0:
        return Mean(math.nan, math.nan, math.nan, 0, math.nan, 0, "none")
    mean = math.fsum(means.values()) / n
    values = [score for task in means for score in scores[task]]
    unit = all(0.0 <= score <= 1.0 for score in values)
    deviations = cluster_sums({task: value - mean for task, value in means.items()}, clusters)
    if len(values) == n == len(deviations) > 1 and all(score in (0.0, 1.0) for score in values):
        return Mean(mean, *wilson_interval(mean, n), n, clustered_error(deviations), n, "wilson")
    low, high, error, method = clustered_interval(mean, deviations, (0.0, 1.0) if unit else None)
    return Mean(mean, low, high, n, error, len(deviations), method)


def suite_mean(means: Sequence[Mean], weights: Sequence[float] | None = None) -> Mean:
    """Weighted mean of environments' scores, which must be on one scale; equal weights by default.

    Weights are normalised to add up to 1. The environments are independent and fixed, not a sample of environments:
    stderr = sqrt(sum of weight^2 stderr^2). The interval combines theirs, each side separately, so that asymmetry is
    preserved: low = score - sqrt(sum of (weight (score_i - low_i))^2), and high likewise (MOVER:
    G. Y. Zou and A. Donner, "Construction of confidence limits about effect measures: a general approach", Statistics
    in Medicine 27 (2008), 1693-1702). A number that is NaN for one environment with a weight is NaN for the
    suite. `n` and `n_clusters` are sums.
    """
    weights = [1.0] * len(means) if weights is None else weights
    total = math.fsum(weights)
    parts = [(weight / total, mean) for weight, mean in zip(weights, means, strict=True) if weight > 0.0]
    if not parts:
        return Mean(math.nan, math.nan, math.nan, 0, math.nan, 0, "none")
    score = math.fsum(weight * mean.score for weight, mean in parts)
    return Mean(
        score,
        score - math.hypot(*(weight * (mean.score - mean.low) for weight, mean in parts)),
        score + math.hypot(*(weight * (mean.high - mean.score) for weight, mean in parts)),
        sum(mean.n for _, mean in parts),
        math.hypot(*(weight * mean.stderr for weight, mean in parts)),
        sum(mean.n_clusters for _, mean in parts),
        "mover",
    )


# ---------------------------------------------------------------------------------------------------------
# One task, asked n times


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Probability that at least one of k episodes is right, estimated from n episodes of a task, c of them right: the
    fraction of k-subsets with a right one, 1 - C(n - c, k) / C(n, k). None when n < k.

    Unbiased. Source: M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021), section 2.1.
    """
    return (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k) if n >= k else None


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Probability that all of k episodes are right: C(c, k) / C(n, k). None when n < k.

    Unbiased. Source: S. Yao et al., "tau-bench" (2024), section 3.
    """
    return math.comb(c, k) / math.comb(n, k) if n >= k else None


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int) -> float | None:
    """Expected score of the most frequent of k answers, by k-subsets of a task's episodes. None when there are fewer
    than k.

    Episode i answered `answers[i]` and scored `scores[i]`. Episodes with the same answer each get the mean of their
    scores; equally frequent answers split a subset equally. An answer of None is no vote; a subset without votes
    scores 0. Exact up to `MAJORITY_DRAWS` subsets; of more, as many are drawn, always the same ones, which for scores
    in [0, 1] gives a standard error of at most 0.5 / sqrt(`MAJORITY_DRAWS`) = 0.025.
    """
    n = len(answers)
    if n < k:
        return None
    of_answer: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            of_answer.setdefault(answer, []).append(score)
    means = {answer: fmean(values) for answer, values in of_answer.items()}

    def score_of_vote(subset: Sequence[str | None]) -> float:
        votes = Counter(answer for answer in subset if answer is not None)
        top = max(votes.values(), default=0)
        return fmean([means[answer] for answer, count in votes.items() if count == top]) if votes else 0.0

    if math.comb(n, k) <= MAJORITY_DRAWS:
        return fmean(map(score_of_vote, combinations(answers, k)))
    rng = random.Random(0)
    return fmean(score_of_vote(rng.sample(answers, k)) for _ in range(MAJORITY_DRAWS))


# ---------------------------------------------------------------------------------------------------------
# Errors and intervals


def cluster_sums(values: Mapping[str, float], clusters: Mapping[str, str] | None) -> list[tuple[float, int]]:
    """The sum and the number of each cluster's values; without `clusters` each value is a cluster."""
    if clusters is None:
        return [(value, 1) for value in values.values()]
    members: dict[str, list[float]] = {}
    for name, value in values.items():
        members.setdefault(clusters[name], []).append(value)
    return [(math.fsum(items), len(items)) for items in members.values()]


def clustered_error(deviations: Sequence[tuple[float, int]]) -> float:
    """The standard error of a mean from the (sum of deviations, size) of two or more clusters (`clustered_mean`)."""
    count, n = len(deviations), sum(size for _, size in deviations)
    return math.sqrt(count / (count - 1) * math.fsum(total**2 for total, _ in deviations)) / n


def clustered_interval(
    mean: float, deviations: Sequence[tuple[float, int]], scale: tuple[float, float] | None
) -> tuple[float, float, float, Method]:
    """The 95% interval of a mean (low, high), its standard error and the interval's method, from each cluster's
    (sum of deviations, size). `scale`: minimum and maximum of values, if known; see `clustered_mean`."""
    if len(deviations) == 1:
        return *(scale or (math.nan, math.nan)), math.nan, "none"
    error = clustered_error(deviations)
    if error > 1e-12 * max(1.0, abs(mean)):
        t = t_quantile(0.975, degrees_of_freedom([size for _, size in deviations]))
        if scale == (0.0, 1.0):
            return *wilson_interval(mean, mean * (1 - mean) / error**2, t), error, "t"
        minimum, maximum = scale or (-math.inf, math.inf)
        return max(mean - t * error, minimum), min(mean + t * error, maximum), error, "t"
    if scale is None:
        return math.nan, math.nan, 0.0, "none"
    return *alike_interval(mean, len(deviations), *scale), 0.0, "wilson"


def degrees_of_freedom(sizes: Sequence[int]) -> float:
    """Degrees of freedom of the t interval around a mean over clusters of these sizes: C - 1 for C of equal size, fewer
    for unequal sizes, and at least 1.

    C is the effective number of clusters, (sum of sizes)^2 / (sum of squared sizes) (L. Kish, "Survey Sampling" (1965),
    section 11.7): a cluster that holds most tasks decides the error nearly alone.
    """
    return max(1.0, sum(sizes) ** 2 / sum(size * size for size in sizes) - 1)


def wilson_interval(share: float, n: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """95% interval of a fraction of n trials: every true fraction within `z` of its standard errors of `share`.

    Source: E. B. Wilson (1927), without continuity correction. `n` need not be whole (`clustered_mean`).
    """
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def alike_interval(value: float, n: int, minimum: float, maximum: float) -> tuple[float, float]:
    """95% interval of the mean of a variable in [`minimum`, `maximum`] after n draws that all had the same `value`.

    Wilson's interval for 0 of n trials bounds the fraction with another value; that value may be the minimum or the
    maximum. For n successes this is Wilson's own interval.
    """
    bound = wilson_interval(0.0, n)[1]
    return value - bound * (value - minimum), value + bound * (maximum - value)


@lru_cache(maxsize=1024)
def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t for a probability in [0.5, 0.99] and at least one degree of freedom, to 1e-5.

    With t = sqrt(df) tan(a) the density is proportional to cos(a)^(df - 1): its sums over a fine grid, up to a t of at
    least 30, are the distribution.
    """
    step = min(math.pi / 2, 30 / math.sqrt(df)) / 10_000
    density = [math.cos(number * step) ** (df - 1) for number in range(10_001)]
    mass = list(accumulate((low + high for low, high in pairwise(density)), initial=0.0))
    target = (2 * probability - 1) * mass[-1]
    place = bisect_left(mass, target, lo=1)
    return math.sqrt(df) * math.tan((place - (mass[place] - target) / (mass[place] - mass[place - 1])) * step)
