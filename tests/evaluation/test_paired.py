"""Comparisons of two policies against NumPy, all sign flips gone through one by one, and tests known from textbooks."""

import itertools
import math
import random
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.evaluation.paired import ENUMERATED, FLIPS, paired_difference, sign_flip
from envgym.evaluation.statistics import clustered_mean


def policies(*pairs):
    """Each pair is what one task scored under A and under B, once each."""
    a = {str(index): [float(score)] for index, (score, _) in enumerate(pairs)}
    b = {str(index): [float(score)] for index, (_, score) in enumerate(pairs)}
    return a, b


def by_enumeration(totals):
    observed = abs(sum(totals)) - 1e-9
    flipped = [sum(np.multiply(signs, totals)) for signs in itertools.product((1, -1), repeat=len(totals))]
    return np.mean([abs(total) >= observed for total in flipped])


def test_the_difference_is_that_of_task_means_and_b_is_better_where_it_is_positive():
    a = {"x": [0.0, 1.0], "y": [1.0], "z": [0.25], "same": [0.1, 0.3]}
    b = {"z": [0.0], "y": [1.0, 1.0, 1.0], "x": [1.0, 1.0], "same": [0.2, 0.2]}
    result = paired_difference(a, b)
    assert result.differences == {"x": 0.5, "y": 0.0, "z": -0.25, "same": 0.0}
    counts = itemgetter("better", "worse", "equal")
    assert (result.mean, result.n, *counts(result.as_dict())) == (0.0625, 4, 1, 1, 2)
    back = paired_difference(b, a)
    assert (back.mean, back.low, back.high) == (-result.mean, -result.high, -result.low)
    assert (*counts(back.as_dict()), back.p_value) == (1, 1, 2, result.p_value)


def test_interval_error_and_detectable_difference_by_numpy_and_a_table():
    """Student's sleep data (1908): the extra sleep of ten patients under two drugs, in hours. The paired t interval is
    printed in many textbooks: 0.70 to 2.46, around 1.58."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    result = paired_difference(*policies(*zip(first, second, strict=True)))
    error = np.subtract(second, first).std(ddof=1) / math.sqrt(10)
    assert result.mean == pytest.approx(1.58)
    assert (result.low, result.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert result.stderr == pytest.approx(error, rel=1e-12)
    assert result.detectable == pytest.approx((2.262157 + 0.883404) * error, abs=1e-5)
    assert result.p_value == by_enumeration(np.subtract(second, first)) == 2 / 512


def test_darwin_s_maize():
    """R. A. Fisher, "The Design of Experiments" (1935), section 21: 15 pairs of plants, heights in eighths of an inch;
    863 of the 32,768 ways to give signs have a sum at least as large as the 314 found, so both ways 1,726."""
    eighths = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    result = paired_difference(*policies(*[(0, height) for height in eighths]))
    assert result.mean == pytest.approx(314 / 15)
    assert result.p_value == 1726 / 32768


def test_two_that_are_independent_of_their_tasks_are_no_better_for_pairing():
    """Hard and easy tasks: pairing removes what tasks add to the variance of either mean."""
    rng = np.random.default_rng(0)
    level = rng.random(50)
    a = {str(i): [float(level[i])] for i in range(50)}
    b = {str(i): [float(min(1, level[i] + 0.02 + 0.01 * rng.random()))] for i in range(50)}
    apart = math.hypot(clustered_mean(a).stderr, clustered_mean(b).stderr)
    paired = paired_difference(a, b)
    assert paired.stderr < apart / 10
    assert paired.low > 0
    assert paired.p_value < 0.001


def test_clusters_are_what_varies_and_what_is_flipped():
    """Six texts with five questions each, all of a text better or worse alike: no more evidence than six tasks."""
    of_text = {f"text {index}": value for index, value in enumerate([0.5, 0.25, 0.5, -0.125, 0.375, 0.25])}
    clusters = {f"{text}/{question}": text for text in of_text for question in range(5)}
    a = {task: [0.5] for task in clusters}
    b = {task: [0.5 + of_text[text]] for task, text in clusters.items()}
    asked = paired_difference(a, b, clusters=clusters)
    once = paired_difference({text: [0.5] for text in of_text}, {text: [0.5 + v] for text, v in of_text.items()})
    assert (asked.n, asked.n_clusters) == (30, 6)
    assert (asked.low, asked.high, asked.stderr) == pytest.approx((once.low, once.high, once.stderr))
    assert asked.p_value == once.p_value == by_enumeration(list(of_text.values()))
    assert paired_difference(a, b).p_value < asked.p_value


def test_tasks_of_one_side_alone_are_counted_and_not_compared():
    a, b = (
        {"x": [1.0], "y": [0.0], "only a": [0.0], "failed": []},
        {"x": [0.0], "y": [0.5], "failed": [1.0], "b": [1.0]},
    )
    result = paired_difference(a, b)
    assert result.differences == {"x": -1.0, "y": 0.5}
    assert (result.only_a, result.only_b) == (1, 2)
    assert result.mean == paired_difference({"x": [1.0], "y": [0.0]}, {"x": [0.0], "y": [0.5]}).mean


def test_nothing_shared_is_no_difference_of_zero():
    result = paired_difference({"x": [1.0]}, {"y": [1.0]}).as_dict()
    assert {name for name, value in result.items() if value is None} == {
        "difference",
        "stderr",
        "p_value",
        "detectable",
        "ci95",
    }
    assert (result["n_tasks"], result["only_a"], result["only_b"]) == (0, 1, 1)


def test_all_alike_is_not_certain():
    """Twenty tasks that score the same under both: another task may still differ (none of 20, by Wilson: 0.1611)."""
    same = paired_difference(*policies(*[(1, 1)] * 20))
    assert (same.mean, same.p_value, same.as_dict()["equal"]) == (0, 1, 20)
    assert (same.low, same.high) == pytest.approx((-0.1611, 0.1611), abs=5e-5)
    solved = paired_difference(*policies(*[(0, 1)] * 20))
    assert (solved.mean, solved.high, solved.p_value) == (1, 1, sign_flip([1.0] * 20, 0))
    assert solved.low == pytest.approx(1 - 2 * 0.1611, abs=1e-4)
    assert math.isnan(same.detectable)


def test_one_task_or_cluster_shows_nothing():
    result = paired_difference(*policies((0, 1)))
    assert (result.mean, result.low, result.high, result.p_value) == (1, -1, 1, 1)
    assert result.as_dict()["stderr"] is None
    assert paired_difference(*policies((0, 7))).as_dict()["ci95"] is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=9))
def test_p_values_are_those_of_all_flips(eighths):
    assert sign_flip([value / 8 for value in eighths], 0) == pytest.approx(by_enumeration(np.array(eighths) / 8))


def test_what_differs_by_how_it_was_rounded_is_as_far_from_0():
    """Ten tenths are 1 or a little less, depending on how they are added up."""
    assert sign_flip([0.1] * 10, 0) == 2 / 2**10


def test_random_flips_agree_with_all_of_them():
    """20 differences, which are too many to be enumerated: all million ways by NumPy, against the drawn 20,000."""
    rng = random.Random(1)
    totals = [rng.gauss(0.45, 1) for _ in range(20)]
    assert len(totals) > ENUMERATED
    sums = np.zeros(1)
    for total in totals:
        sums = np.concatenate([sums + total, sums - total])
    exact = np.mean(np.abs(sums) >= abs(sum(totals)) - 1e-9)
    assert 0.02 < exact < 0.5
    assert sign_flip(totals, 0) == pytest.approx(exact, abs=4 * math.sqrt(exact / FLIPS))
    assert sign_flip(totals, 0) == sign_flip(totals, 0)
    assert sign_flip(totals, 1) != sign_flip(totals, 0)


def test_random_flips_never_say_impossible():
    assert sign_flip([1.0] * 100, 0) == 1 / (1 + FLIPS)


def test_without_a_difference_p_is_uniform():
    """300 comparisons of a policy with itself: one in twenty is below 0.05, half are below 0.5."""
    rng, found = np.random.default_rng(5), []
    for _ in range(300):
        p = rng.beta(2, 2, 14)
        a, b = (rng.binomial(4, p) / 4 for _ in range(2))
        found.append(paired_difference(*policies(*zip(a, b, strict=True))).p_value)
    assert np.mean(np.less_equal(found, 0.05)) <= 0.08
    assert np.mean(np.less_equal(found, 0.5)) == pytest.approx(0.5, abs=0.1)


def test_the_detectable_difference_is_found_four_times_in_five():
    """Normal differences whose mean is what the true standard error makes detectable, tested by the interval."""
    rng, n, found = np.random.default_rng(2), 10, 0
    truth = (2.262157 + 0.883404) / math.sqrt(n)  # t of 9 degrees at 97.5% and at 80%
    for _ in range(1000):
        result = paired_difference(*policies(*[(0, x) for x in rng.normal(truth, 1, n)]))
        found += result.low > 0
    assert found / 1000 == pytest.approx(0.8, abs=0.04)
