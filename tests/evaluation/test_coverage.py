"""How often the 95% intervals hold the truth: in 93 to 97 of 100 suites, over 2,000 simulated suites each.

Every population is one an evaluation may meet, with a mean that is known: tasks differ in how often they are solved
(Beta(2, 2), a half on the mean), episodes of one task are draws at its rate. The intervals are those of the functions
that evaluations call. Coverage of 2,000 suites is itself known to 0.5 points (one standard error).
"""

import math

import numpy as np
import pytest

from envgym.evaluation import paired
from envgym.evaluation.statistics import clustered_mean, suite_mean, wilson_interval

SUITES = 2000
SIZES = (20, 100, 500)
UNEQUAL = (1, 1, 2, 2, 3, 3, 4, 4)
SKEWED = (1, 1, 1, 1, 1, 1, 1, 1, 4, 8)


def rates(rng, cluster_of, alike=0.7):
    """Each task's rate: its cluster's with probability `alike`, one of its own otherwise. [tasks]"""
    own, shared = rng.beta(2, 2, len(cluster_of)), rng.beta(2, 2, cluster_of[-1] + 1)
    return np.where(rng.random(len(cluster_of)) < alike, shared[cluster_of], own)


def named(scores):
    return {str(task): values for task, values in enumerate(scores)}


def clusters_of(sizes, n):
    """Cluster numbers [n] of clusters of these sizes, over and over."""
    pattern = np.repeat(np.arange(len(sizes)), sizes)
    return np.concatenate([pattern + len(sizes) * turn for turn in range(n // len(pattern))])


def repeated(rng, n):
    """Four episodes of each task, solved or not. Mean 1/2."""
    return clustered_mean(named((rng.random((n, 4)) < rng.beta(2, 2, (n, 1))).astype(float).tolist()))


def ragged(rng, n):
    """One to six episodes of each task: some failed, say. Mean 1/2."""
    solved, played = rng.random((n, 6)) < rng.beta(2, 2, (n, 1)), rng.integers(1, 7, n)
    return clustered_mean(named(row[:count].astype(float).tolist() for row, count in zip(solved, played, strict=True)))


def nearly_solved(rng, n):
    """Four episodes of each task, most of which are solved nearly always. Mean 0.9."""
    return clustered_mean(named((rng.random((n, 4)) < rng.beta(9, 1, (n, 1))).astype(float).tolist()))


def graded(rng, n):
    """One episode of each task, with a score in quarters, mostly high. Mean 0.7."""
    return clustered_mean(named((rng.binomial(4, 0.7, (n, 1)) / 4).tolist()))


def in_clusters(sizes):
    def draw(rng, n):
        """Four episodes of each task; tasks of a cluster are alike. Mean 1/2."""
        cluster_of = clusters_of(sizes, n)
        solved = rng.random((n, 4)) < rates(rng, cluster_of)[:, None]
        return clustered_mean(named(solved.astype(float).tolist()), named(cluster_of.astype(str).tolist()))

    return draw


POPULATIONS = {
    "repeated": (repeated, 0.5),
    "ragged": (ragged, 0.5),
    "nearly solved": (nearly_solved, 0.9),
    "graded": (graded, 0.7),
    "clusters": (in_clusters((4,)), 0.5),
    "unequal clusters": (in_clusters(UNEQUAL), 0.5),
}


def coverage(draw, truth, n, seed=0):
    rng, covered = np.random.default_rng(seed), 0
    for _ in range(SUITES):
        result = draw(rng, n)
        covered += result.low <= truth <= result.high
    return covered / SUITES


@pytest.mark.parametrize("n", [20, 100, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("population", POPULATIONS)
def test_the_t_interval_of_clusters_covers(population, n):
    draw, truth = POPULATIONS[population]
    assert draw(np.random.default_rng(0), n).method == "t"
    share = coverage(draw, truth, n)
    print(f"t, {population}, n={n}: {share:.4f}")
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize("n", SIZES[:2])
def test_where_one_cluster_outweighs_the_others_the_interval_is_rather_too_wide(n):
    """One text has eight of every twenty questions. With C - 1 degrees of freedom coverage is 0.89 for n=20."""
    share = coverage(in_clusters(SKEWED), 0.5, n)
    print(f"t, skewed clusters, n={n}: {share:.4f}")
    assert 0.94 <= share <= 0.98


def test_the_t_interval_of_500_tasks_covers():
    """The one of the large suites that is short enough to be run every time."""
    assert 0.93 <= coverage(repeated, 0.5, 500) <= 0.97


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", [0.3, 0.5, 0.8])
def test_wilson_s_interval_covers(p, n):
    """One episode of each task. As the number of solved tasks is a whole number, coverage jumps up and down with the
    rate (`test_wilson_s_interval_at_one_rate`), so the suites' rates lie around `p`: within 0.05, in steps of 0.005."""
    rng = np.random.default_rng(0)
    near = p + 0.005 * rng.integers(-10, 11, SUITES)
    solved = rng.binomial(n, near)
    intervals = {count: clustered_mean(named([float(task < count)] for task in range(n))) for count in set(solved)}
    assert all(interval.method == "wilson" for interval in intervals.values())
    share = np.mean([intervals[count].low <= p <= intervals[count].high for count, p in zip(solved, near, strict=True)])
    print(f"wilson, p={p}, n={n}: {share:.4f}")
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize("n", SIZES)
def test_wilson_s_interval_at_one_rate(n):
    """Its exact coverage, summed over the binomial distribution, at each rate from 0.05 to 0.95: about 0.95 on the
    mean, and nowhere far from it. L. D. Brown, T. T. Cai and A. DasGupta, "Interval Estimation for a Binomial
    Proportion" (2001), section 3, show these oscillations."""
    intervals = np.array([wilson_interval(count / n, n) for count in range(n + 1)])
    log_ways = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)])
    at = []
    for p in np.arange(0.05, 0.9501, 0.005):
        counts = np.arange(n + 1)
        chances = np.exp(log_ways + counts * math.log(p) + (n - counts) * math.log(1 - p))
        at.append(chances[(intervals[:, 0] <= p) & (p <= intervals[:, 1])].sum())
    print(f"wilson, exact, n={n}: {np.mean(at):.4f}, from {min(at):.4f} to {max(at):.4f}")
    assert np.mean(at) == pytest.approx(0.95, abs=0.006)
    assert min(at) > 0.9


def of_environments(rng, n):
    """Three environments with n tasks each: graded, single episodes that are mostly solved, and repeated ones."""
    single = clustered_mean(named((rng.random((n, 1)) < 0.8).astype(float).tolist()))
    return suite_mean([graded(rng, n), single, repeated(rng, n)], [1, 2, 1])


@pytest.mark.parametrize("n", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES[1:])])
def test_a_suite_s_interval_covers(n):
    share = coverage(of_environments, (0.7 + 2 * 0.8 + 0.5) / 4, n)
    print(f"suite, n={n}: {share:.4f}")
    assert 0.93 <= share <= 0.97


def two_policies(sizes):
    def draw(rng, n):
        """Two episodes of each task under either policy; B is halfway between A and a rate of 0.7. Mean 0.1."""
        cluster_of = clusters_of(sizes, n)
        rate = rates(rng, cluster_of)[:, None]
        a, b = ((rng.random((n, 2)) < p).astype(float).tolist() for p in (rate, (rate + 0.7) / 2))
        return paired.paired_difference(named(a), named(b), clusters=named(cluster_of.astype(str).tolist()))

    return draw


@pytest.mark.parametrize("n", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES[1:])])
@pytest.mark.parametrize("sizes", [(1,), (4,), UNEQUAL], ids=["tasks", "clusters", "unequal clusters"])
def test_the_interval_of_a_difference_covers(sizes, n, monkeypatch):
    monkeypatch.setattr(paired, "FLIPS", 1)  # the p-value takes long, and is not asked for
    monkeypatch.setattr(paired, "ENUMERATED", 0)
    share = coverage(two_policies(sizes), 0.1, n)
    print(f"paired, sizes {sizes}, n={n}: {share:.4f}")
    assert 0.93 <= share <= 0.97
