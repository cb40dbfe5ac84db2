"""Failures that depend on the answers are told from those that do not."""

import math
import random
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from envgym.monitoring.alarms import Alarms
from envgym.monitoring.metrics import failure_bias
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn

TASK = Task("t", prompt="")
FAILED, FINISHED = Outcome.fail("environment", "broken"), Outcome.finish()


def episode(lengths, *, failed=False, reward=1.0, surprise=0.5):
    """An episode whose answers have these lengths."""
    segments = [Segment("action", range(n), logprobs=[-surprise] * n) for n in lengths]
    rows = [Row(segments, turns=[Turn(None, StopReason.STOP) for _ in lengths])]
    return Episode("", TASK, FAILED if failed else FINISHED, rows=rows, reward=None if failed else reward)


def test_nothing_is_measured_without_failures_or_without_a_comparison():
    assert failure_bias([Group("g", TASK, [episode([3]), episode([4])])]) == {}
    assert failure_bias([Group("g", TASK, [episode([3], failed=True), episode([4], failed=True)])]) == {}


def test_the_difference_is_in_standard_deviations_of_every_labelling():
    """Against all ways to choose the two members that failed, counted out."""
    lengths, failed = [2, 3, 5, 9, 4], (2, 3)
    sums = [sum(lengths[i] for i in chosen) for chosen in combinations(range(5), 2)]
    expected = (lengths[2] + lengths[3] - fmean(sums)) / pstdev(sums)
    group = Group("g", TASK, [episode([n], failed=i in failed) for i, n in enumerate(lengths)])
    assert failure_bias([group])["failures/by_length"] == pytest.approx(expected)


def test_an_answer_is_compared_with_those_of_its_turn():
    """The last answers are short in every episode, and the failure after the first says nothing about its length."""
    members = [episode([10, 1]), episode([12, 1]), episode([11], failed=True), episode([9, 1]), episode([13, 1])]
    assert failure_bias([Group("g", TASK, members)])["failures/by_length"] == pytest.approx(0.0)
    assert failure_bias([Group("g", TASK, members)])["failures/by_turns"] < 0


def test_groups_of_lower_rewards_fail_more_often_and_attempts_that_were_retried_count():
    groups = []
    for number, share in enumerate((0, 1, 2, 3)):
        members = [episode([3], reward=1 - share / 4) for _ in range(4)]
        groups.append(Group(str(number), TASK, members, superseded=[episode([3], failed=True)] * share))
    assert failure_bias(groups)["failures/by_reward"] < -1.5


def test_failures_with_a_reward_are_part_of_the_learning_and_not_left_out():
    rewarded = episode([9], failed=True)
    rewarded.reward = 0.0
    assert failure_bias([Group("g", TASK, [rewarded, episode([1]), episode([2])])]) == {}


def run_of_steps(seed, fails):
    """The alarms of 30 steps, 16 groups each, whose answers fail with the probability `fails(right, length)`."""
    rng, alarms, raised = random.Random(seed), Alarms(), []
    for _ in range(30):
        groups = []
        for number in range(16):
            difficulty, members = rng.random(), []
            for _ in range(8):
                right, length = rng.random() > difficulty, rng.randint(1, 40)
                surprise = 0.5 + 0.2 * rng.random() + (not right) * 0.2
                failed = rng.random() < fails(right, length)
                members.append(episode([length], failed=failed, reward=float(right), surprise=surprise))
            groups.append(Group(str(number), TASK, members))
        raised += [alarm.name for alarm in alarms.observe(failure_bias(groups))]
    return raised


def test_ten_runs_whose_failures_are_chance_raise_no_alarm():
    assert [run_of_steps(seed, lambda right, length: 0.1) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize(
    ("fails", "alarm"),
    [
        (lambda right, length: 0.02 if right else 0.3, "failures_by_reward"),
        (lambda right, length: float(not right), "failures_by_surprise"),  # all that remain have the same reward
        (lambda right, length: 0.01 * length, "failures_by_length"),
    ],
)
def test_failures_of_wrong_or_long_answers_raise_one(fails, alarm):
    assert alarm in run_of_steps(0, fails)


def test_values_are_about_standard_normal_by_chance():
    rng = random.Random(0)
    values = []
    for _ in range(300):
        groups = [
            Group(str(number), TASK, [episode([rng.randint(1, 40)], failed=rng.random() < 0.2) for _ in range(8)])
            for number in range(8)
        ]
        values.append(failure_bias(groups)["failures/by_length"])
    assert abs(fmean(values)) < 3 / math.sqrt(300)
    assert 0.85 < pstdev(values) < 1.15
