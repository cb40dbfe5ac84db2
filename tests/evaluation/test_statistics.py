"""Intervals against published tables, a brute-force formula and a small simulation."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.evaluation.statistics import clustered_mean, t_quantile_975, wilson_interval

SCORES = st.dictionaries(st.text(max_size=3), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("df", "quantile"),
    # Any table of Student's t, two-sided 5%.
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (60, 2.0003), (120, 1.9799)],
)
def test_t_quantiles_are_the_tables(df, quantile):
    assert t_quantile_975(df) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize("df", [10_000, 1_000_000])
def test_with_many_degrees_of_freedom_t_is_the_normal_distribution(df):
    # First term of the Cornish-Fisher expansion around z.
    z = 1.959963984540054
    assert t_quantile_975(df) == pytest.approx(z + (z**3 + z) / (4 * df), abs=1e-6)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # R. G. Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(successes, n, low, high):
    assert wilson_interval(successes / n, n) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(1 - successes / n, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_mean_is_that_of_task_means_and_its_error_that_of_tasks():
    """Four tasks with unequal numbers of episodes; the interval by NumPy and a table's t of three degrees."""
    scores = {"a": [1, 1, 1, 1, 1, 1], "b": [0], "c": [0, 1], "d": [0.5, 1]}
    means = np.array([1, 0, 0.5, 0.75])
    half = 3.18245 * means.std(ddof=1) / 2
    result = clustered_mean(scores)
    assert (result.score, result.n) == (means.mean(), 4)
    assert result.low == pytest.approx(max(0, means.mean() - half), abs=1e-5)
    assert result.high == pytest.approx(min(1, means.mean() + half), abs=1e-5)


def test_scores_outside_the_unit_interval_are_not_cut_to_it():
    result = clustered_mean({"a": [-4.0], "b": [6.0]})
    assert result.score == 1
    assert result.low == pytest.approx(1 - 12.7062 * 5, abs=1e-3)
    assert result.high == pytest.approx(1 + 12.7062 * 5, abs=1e-3)


def test_repeating_a_task_does_not_make_it_more_than_one():
    once = {"a": [1.0], "b": [0.25], "c": [1.0]}
    assert clustered_mean({name: values * 50 for name, values in once.items()}) == clustered_mean(once)


def test_all_solved_is_not_certain():
    result = clustered_mean({str(task): [1.0, 1.0] for task in range(20)})
    assert (result.score, result.high) == (1, 1)
    assert result.low == pytest.approx(1 - 0.1611, abs=5e-5)


def test_tasks_without_scores_are_left_out():
    assert clustered_mean({"a": [], "b": [0.5], "c": [0.25]}) == clustered_mean({"b": [0.5], "c": [0.25]})


def test_nothing_to_average_is_not_zero():
    result = clustered_mean({"a": []})
    assert result.n == 0
    assert all(math.isnan(number) for number in (result.score, result.low, result.high, result.stderr))
    assert result.as_dict() == {"score": None, "ci95": None, "stderr": None, "n_tasks": 0}


@settings(max_examples=50)
@given(SCORES)
def test_the_interval_holds_the_mean_and_stays_within_the_scale(scores):
    result = clustered_mean(scores)
    assert 0 <= result.low <= result.score + 1e-12
    assert result.score - 1e-12 <= result.high <= 1


@pytest.mark.parametrize(
    ("n_tasks", "share", "least"),
    # Near the ends of the scale a symmetric interval from few tasks is a little short: that is what t intervals do.
    [(10, 0.5, 0.93), (64, 0.3, 0.93), (64, 0.9, 0.9)],
)
def test_the_interval_covers_the_truth_about_95_times_in_100(n_tasks, share, least):
    """Tasks differ in difficulty, and a task's four episodes are alike: a plain binomial interval would miss often."""
    rng, trials, covered, naive = random.Random(0), 600, 0, 0
    for _ in range(trials):
        scores = {}
        for task in range(n_tasks):
            p = rng.betavariate(share, 1 - share)  # mean `share`, mostly near 0 or 1
            scores[str(task)] = [float(rng.random() < p) for _ in range(4)]
        result = clustered_mean(scores)
        covered += result.low <= share <= result.high
        low, high = wilson_interval(result.score, 4 * n_tasks)
        naive += low <= share <= high
    assert least <= covered / trials <= 0.98
    assert naive / trials < 0.88
