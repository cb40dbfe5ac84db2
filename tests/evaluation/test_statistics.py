"""The statistics against published tables, all subsets counted one by one, and inspect_ai's own numbers.

How often intervals cover the truth is `test_coverage.py`.
"""

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.evaluation.statistics import (
    Mean,
    clustered_mean,
    degrees_of_freedom,
    majority_at_k,
    pass_at_k,
    pass_hat_k,
    suite_mean,
    t_quantile,
    wilson_interval,
)

INSPECT = json.loads(Path(__file__).with_name("inspect").joinpath("numbers.json").read_text(encoding="utf-8"))
SCORES = st.dictionaries(st.text(max_size=3), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("df", "quantile"),
    # Any table of Student's t, two-sided 5%.
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (60, 2.0003), (120, 1.9799)],
)
def test_t_quantiles_are_the_tables(df, quantile):
    assert t_quantile(0.975, df) == pytest.approx(quantile, abs=5e-5)


@pytest.mark.parametrize("p", [0.6, 0.8, 0.95, 0.975, 0.99])
def test_t_quantiles_are_those_of_the_closed_forms(p):
    """W. T. Shaw, "Sampling Student's T distribution" (2006), gives the quantiles for 1, 2 and 4 degrees of freedom."""
    root = math.sqrt(4 * p * (1 - p))
    assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), abs=1e-6)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) * math.sqrt(2) / root, abs=1e-6)
    assert t_quantile(p, 4) == pytest.approx(2 * math.sqrt(math.cos(math.acos(root) / 3) / root - 1), abs=1e-6)


@pytest.mark.parametrize("df", [1.0, 1.7, 5.22, 23.27, 199.5])
def test_t_quantiles_for_broken_degrees_of_freedom(df):
    """The density up to the quantile, by the trapezoidal rule, holds what it is the quantile of."""
    for p in (0.8, 0.975):
        x = np.linspace(0, t_quantile(p, df), 200_001)
        density = (1 + x * x / df) ** (-(df + 1) / 2)
        density *= math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        assert 0.5 + np.trapezoid(density, x) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("df", [10_000, 1_000_000])
def test_with_many_degrees_of_freedom_t_is_the_normal_distribution(df):
    # First term of the Cornish-Fisher expansion around z.
    z = 1.959963984540054
    assert t_quantile(0.975, df) == pytest.approx(z + (z**3 + z) / (4 * df), abs=1e-5)


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
    """Four tasks with unequal numbers of episodes; the error by NumPy."""
    scores = {"a": [1, 1, 1, 1, 1, 1], "b": [0], "c": [0, 1], "d": [0.5, 1]}
    means = np.array([1, 0, 0.5, 0.75])
    result = clustered_mean(scores)
    assert (result.score, result.n, result.method) == (means.mean(), 4, "t")
    assert result.stderr == pytest.approx(means.std(ddof=1) / 2, rel=1e-12)


def test_the_ends_of_the_interval_are_t_of_their_own_errors_away():
    """A table's t of three degrees. The error is as large at the ends as the scale leaves room for there."""
    result = clustered_mean({"a": [1, 1], "b": [0.9], "c": [0.5, 1], "d": [1.0]})
    mean = result.score
    for end in (result.low, result.high):
        error = result.stderr * math.sqrt(end * (1 - end) / (mean * (1 - mean)))
        assert abs(end - mean) == pytest.approx(3.182446 * error, rel=1e-6)
    assert mean - result.low > result.high - mean


def test_the_interval_of_many_tasks_is_as_wide_as_student_s():
    scores = np.random.default_rng(0).random(1000)
    result = clustered_mean({str(task): [score] for task, score in enumerate(scores.tolist())})
    half = 1.962341 * scores.std(ddof=1) / math.sqrt(1000)
    assert (result.low, result.high) == pytest.approx((scores.mean() - half, scores.mean() + half), abs=1e-4)


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


def test_one_task_or_one_cluster_says_nothing_of_others():
    alone = clustered_mean({"a": [0.25, 0.5]})
    assert (alone.score, alone.low, alone.high, alone.method) == (0.375, 0, 1, "none")
    assert alone.as_dict() == {"score": 0.375, "ci95": [0, 1], "stderr": None, "n_tasks": 1}
    together = clustered_mean({"a": [1.0], "b": [0.0], "c": [0.5]}, dict.fromkeys("abc", "text"))
    assert (together.low, together.high, together.n, together.n_clusters) == (0, 1, 3, 1)
    # Scores of which nobody knows how far they reach have no interval then.
    assert clustered_mean({"a": [3.0]}).as_dict() == {"score": 3.0, "ci95": None, "stderr": None, "n_tasks": 1}
    assert clustered_mean({"a": [3.0], "b": [3.0]}).as_dict()["ci95"] is None


def test_wilson_where_tasks_are_trials_and_t_where_they_are_not():
    trials = {str(task): [float(task < 15)] for task in range(148)}
    assert (result := clustered_mean(trials)).method == "wilson"
    assert (result.low, result.high) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert clustered_mean({name: values * 2 for name, values in trials.items()}).method == "t"
    assert clustered_mean({**trials, "half": [0.5]}).method == "t"
    assert clustered_mean(trials, {task: f"text {int(task) // 2}" for task in trials}).method == "t"
    # Clusters of one task each are the tasks.
    assert clustered_mean(trials, {task: f"text {task}" for task in trials}) == result


def test_tasks_of_a_cluster_count_as_one_where_they_are_alike():
    """Ten texts, four questions each with the text's score: the error is that of ten scores, not of forty."""
    rng = np.random.default_rng(3)
    of_text = {f"text {index}": float(score) for index, score in enumerate(rng.random(10))}
    clusters = {f"{text}/{question}": text for text in of_text for question in range(4)}
    asked = clustered_mean({task: [of_text[text]] for task, text in clusters.items()}, clusters)
    once = clustered_mean({text: [score] for text, score in of_text.items()})
    assert (asked.n, asked.n_clusters, once.n_clusters) == (40, 10, 10)
    assert asked.stderr == pytest.approx(once.stderr, rel=1e-12)
    assert (asked.low, asked.high) == pytest.approx((once.low, once.high), rel=1e-9)


def test_a_task_without_a_cluster_is_an_error():
    with pytest.raises(KeyError, match="b"):
        clustered_mean({"a": [1.0], "b": [0.0]}, {"a": "text"})


@pytest.mark.parametrize(
    ("sizes", "df"),
    # Sums of squares by hand: 60, 110, 4000, 82.
    [
        ([1, 1, 2, 2, 3, 3, 4, 4], 400 / 60 - 1),
        ([1] * 10 + [10], 400 / 110 - 1),
        ([10, 10, 10, 10, 60], 1.5),
        ([1, 9], 1),
    ],
)
def test_degrees_of_freedom_are_those_of_the_effective_number_of_clusters(sizes, df):
    assert degrees_of_freedom(sizes) == pytest.approx(df, rel=1e-12)


def test_clusters_of_one_size_have_one_degree_less_than_there_are():
    assert degrees_of_freedom([1] * 30) == 29
    assert degrees_of_freedom([7] * 5) == 4


@pytest.mark.parametrize("made", [pytest.param(made, id=made["case"]) for made in INSPECT["means"]])
def test_means_and_errors_are_those_of_inspect_ai(made):
    tasks = [str(index) for index in range(len(made["scores"]))]
    clusters = None if made["clusters"] is None else dict(zip(tasks, made["clusters"], strict=True))
    result = clustered_mean(dict(zip(tasks, made["scores"], strict=True)), clusters)
    assert result.score == pytest.approx(made["mean"], abs=1e-12)
    assert result.stderr == pytest.approx(made["stderr"], abs=1e-9)
    # Intervals are alike for scores without a known range; for those in [0, 1] ours has another form.
    doubled = {task: [2 * score + 1 for score in values] for task, values in zip(tasks, made["scores"], strict=True)}
    result, (low, high) = clustered_mean(doubled, clusters), (2 * end + 1 for end in made["ci"])
    if made["case"] in ("unequal_clusters", "two_clusters"):
        # inspect_ai counts C - 1 degrees of freedom also where clusters differ in size, and covers too little there.
        assert result.low <= low + 1e-9
        assert result.high >= high - 1e-9
    else:
        assert (result.low, result.high) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("made", INSPECT["attempts"], ids=lambda made: f"{made['n']}-{made['c']}-{made['k']}")
def test_pass_at_k_and_pass_hat_k_are_those_of_inspect_ai(made):
    """Fewer episodes than k have neither, in both implementations."""
    n, c, k = made["n"], made["c"], made["k"]
    for ours, theirs in ((pass_at_k(n, c, k), made["pass_at"]), (pass_hat_k(n, c, k), made["pass_k"])):
        assert (ours is None) == (theirs is None) == (n < k)
        assert ours is None or ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (6, 0), (6, 2), (7, 5), (8, 8)])
def test_pass_at_k_and_pass_hat_k_count_all_subsets(n, c):
    right = [index < c for index in range(n)]
    for k in range(1, n + 1):
        subsets = [[right[index] for index in chosen] for chosen in itertools.combinations(range(n), k)]
        assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(subset) for subset in subsets]), abs=1e-15)
        assert pass_hat_k(n, c, k) == pytest.approx(np.mean([all(subset) for subset in subsets]), abs=1e-15)
    assert pass_at_k(n, c, n + 1) is None
    assert pass_hat_k(n, c, n + 1) is None


def test_pass_at_k_holds_for_many_episodes():
    # 1 - (1 - p)^k for a huge number of episodes, of which one in a thousand is right
    assert pass_at_k(1_000_000, 1000, 10) == pytest.approx(1 - 0.999**10, rel=1e-4)


def majority_by_subsets(answers, scores, k):
    of_answer = {
        answer: np.mean([score for other, score in zip(answers, scores, strict=True) if other == answer])
        for answer in set(answers) - {None}
    }
    earned = []
    for subset in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[index] for index in subset if answers[index] is not None)
        winners = [answer for answer in votes if votes[answer] == max(votes.values())]
        earned.append(np.mean([of_answer[answer] for answer in winners]) if winners else 0.0)
    return np.mean(earned)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.floats(0, 1)), min_size=1, max_size=9))
def test_majority_counts_all_subsets(episodes):
    answers, scores = zip(*episodes, strict=True)
    for k in range(1, len(answers) + 1):
        assert majority_at_k(answers, scores, k) == pytest.approx(majority_by_subsets(answers, scores, k), abs=1e-9)
    assert majority_at_k(answers, scores, len(answers) + 1) is None


def test_majority_by_hand():
    answers, scores = ["4", "4", "5", None], [1.0, 1.0, 0.0, 0.0]
    assert majority_at_k(answers, scores, 1) == 0.5  # the one without an answer is not right
    # Of the six pairs: 4 4, 4 5 twice (shared), 4 - twice, 5 -
    assert majority_at_k(answers, scores, 2) == pytest.approx((1 + 2 * 0.5 + 2 * 1 + 0) / 6)
    assert majority_at_k(answers, scores, 4) == 1
    assert majority_at_k([None, None], [0.0, 0.0], 2) == 0
    # One answer, judged differently in two episodes, is worth what it scores on the mean.
    assert majority_at_k(["x", "x"], [1.0, 0.0], 1) == 0.5


def test_where_there_are_too_many_subsets_a_majority_is_estimated_always_alike():
    """Of 64 answers 24 are right and the others all different, so two right ones win: the exact share of subsets with
    two, and half of a tie's."""
    answers = ["right"] * 24 + [f"wrong {index}" for index in range(40)]
    scores = [1.0] * 24 + [0.0] * 40
    assert majority_at_k(answers, scores, 32) > 0.999
    for k in (2, 4, 8):
        without, single = math.comb(40, k), 24 * math.comb(40, k - 1)
        exact = 1 - (without + single * (1 - 1 / k)) / math.comb(64, k)
        assert majority_at_k(answers, scores, k) == pytest.approx(exact, abs=4 * 0.025)
        assert majority_at_k(answers, scores, k) == majority_at_k(answers, scores, k)


def test_estimates_of_majorities_are_not_all_off_to_one_side():
    """Tasks with other answers are drawn alike, and their errors cancel: the mean of 200 is within four of its errors
    of the exact one, 1 - (all wrong or right ones tied) by hand as above."""
    rng, k = random.Random(1), 4
    estimates, exact = [], []
    for _ in range(200):
        right = rng.randint(10, 40)
        order = ["right"] * right + [f"wrong {index}" for index in range(64 - right)]
        rng.shuffle(order)
        estimates.append(majority_at_k(order, [float(answer == "right") for answer in order], k))
        without, single = math.comb(64 - right, k), right * math.comb(64 - right, k - 1)
        exact.append(1 - (without + single * (1 - 1 / k)) / math.comb(64, k))
    assert np.mean(estimates) == pytest.approx(np.mean(exact), abs=4 * 0.025 / math.sqrt(200))


def mean_of(score, low, high, stderr=0.1, n=10):
    return Mean(score, low, high, n, stderr, n, "t")


def test_a_suite_s_interval_is_put_together_side_by_side():
    """Newcombe's square-and-add by hand: 0.5 (0.4, 0.7) and 0.9 (0.6, 0.95), weighted 1 to 3."""
    suite = suite_mean([mean_of(0.5, 0.4, 0.7, 0.08), mean_of(0.9, 0.6, 0.95, 0.05, 20)], [1, 3])
    assert suite.score == pytest.approx(0.8)
    assert suite.low == pytest.approx(0.8 - math.sqrt(0.025**2 + 0.225**2))
    assert suite.high == pytest.approx(0.8 + math.sqrt(0.05**2 + 0.0375**2))
    assert suite.stderr == pytest.approx(math.sqrt(0.02**2 + 0.0375**2))
    assert (suite.n, suite.n_clusters, suite.method) == (30, 30, "mover")


def test_a_suite_of_one_is_that_one():
    one = clustered_mean({str(task): [float(task < 3)] for task in range(10)})
    suite = suite_mean([one])
    assert (suite.score, suite.low, suite.high, suite.stderr) == pytest.approx(
        (one.score, one.low, one.high, one.stderr)
    )


def test_the_difference_of_two_shares_as_published():
    """R. G. Newcombe, "Interval estimation for the difference between independent proportions" (1998), table II,
    method 10: 56/70 - 48/80 has (0.0524, 0.3339). The second share is taken with its sign turned, at weight 1."""
    first, second = wilson_interval(56 / 70, 70), wilson_interval(48 / 80, 80)
    suite = suite_mean([mean_of(0.8, *first), mean_of(-0.6, -second[1], -second[0])])
    assert (2 * suite.low, 2 * suite.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_nothing_stands_in_for_what_a_part_of_a_suite_lacks():
    known, alone, empty = mean_of(0.5, 0.4, 0.7), clustered_mean({"a": [2.0]}), clustered_mean({})
    assert suite_mean([known, alone]).score == 1.25
    assert suite_mean([known, alone]).as_dict()["ci95"] is None
    assert suite_mean([known, alone]).as_dict()["stderr"] is None
    assert suite_mean([known, empty]).as_dict()["score"] is None
    assert suite_mean([known, empty], [1, 0]).score == 0.5
    assert suite_mean([]).as_dict() == {"score": None, "ci95": None, "stderr": None, "n_tasks": 0}
