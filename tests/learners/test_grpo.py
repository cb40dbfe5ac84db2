"""GRPO's advantages: a table worked by hand, an independent float64 formula, and what must hold for any group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.learners.grpo import GRPO, GRPOConfig, standardize
from envgym.types import Episode, Group, Outcome, Row, Segment, Task, number_rows

REWARDS = st.floats(-1e6, 1e6, allow_subnormal=False)


def group(*rewards, n_rows=1, id="g"):
    """A group with an episode for each reward: two prompt tokens, three sampled ones."""
    return Group(id, Task("t"), [episode(reward, n_rows) for reward in rewards])


def episode(reward, n_rows=1):
    row = [Segment("prompt", [1, 2]), Segment("action", [3, 4, 5], logprobs=[-0.1, -0.2, -0.3])]
    return Episode("e", Task("t"), Outcome.finish(), rows=[Row(row) for _ in range(n_rows)], reward=reward)


def advantages(rows):
    """One advantage a row, after checking that all of the row's sampled tokens carry it."""
    for row in rows:
        assert len(set(row.arrays["advantages"][2:].tolist())) == 1
    return [float(row.arrays["advantages"][-1]) for row in rows]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 1/4, unbiased std sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1/2
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        # mean 2, std sqrt((1 + 0 + 1) / 2) = 1
        ([1, 2, 3], [-1, 0, 1]),
        # n = 2: mean 3, std sqrt(2), whatever the distance
        ([2, 4], [-(2**-0.5), 2**-0.5]),
        ([7, 7, 7], [0, 0, 0]),
    ],
)
def test_by_hand(rewards, expected):
    assert standardize(rewards, 0.0) == pytest.approx(expected, abs=1e-12)


def test_eps_is_added_to_the_standard_deviation():
    assert standardize([1, 2, 3], 1.0) == pytest.approx([-0.5, 0, 0.5])


@given(st.lists(REWARDS, min_size=2, max_size=16), st.floats(1e-8, 1))
def test_is_the_formula(rewards, eps):
    r = np.array(rewards)
    expected = (r - r.mean()) / (r.std(ddof=1) + eps) if len(set(rewards)) > 1 else np.zeros(len(r))
    np.testing.assert_allclose(standardize(rewards, eps), expected, rtol=1e-6, atol=1e-4)


@given(REWARDS, st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(reward, n):
    # 0.1 summed ten times is not ten times 0.1: a mean that is off by one bit must not make an advantage.
    assert standardize([reward] * n, 1e-6) == [0.0] * n


@given(st.lists(REWARDS, min_size=2, max_size=8), st.floats(-1e3, 1e3))
def test_does_not_change_when_all_rewards_are_shifted(rewards, shift):
    shifted = [reward + shift for reward in rewards]
    if len(set(shifted)) == len(set(rewards)):
        np.testing.assert_allclose(standardize(shifted, 1e-3), standardize(rewards, 1e-3), atol=1e-4)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_rewards_of_any_finite_size(scale):
    assert standardize([scale, 2 * scale, 3 * scale], 0.0) == pytest.approx([-1, 0, 1])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1e308, -1e308], [2**-0.5, -(2**-0.5)]),
        ([1.7e308, -1.7e308, -1.7e308], [2 / 3**0.5, -(3**-0.5), -(3**-0.5)]),  # mean -m/3, deviation m (4/3)^(1/2)
        ([1e308, 1e308, 1e308, 0.0], [0.5, 0.5, 0.5, -1.5]),
    ],
)
def test_rewards_next_to_the_largest_number_do_not_overflow(rewards, expected):
    assert standardize(rewards, 1e-6) == pytest.approx(expected, rel=1e-12)


def test_ragged_groups_are_standardised_each_by_itself():
    """Failed members have left; the others are compared with each other only."""
    rows = GRPO(GRPOConfig(name="grpo")).prepare(number_rows([group(1, 0, 0, 0), group(10, 20, 30), group(5, 5)]))
    assert advantages(rows) == pytest.approx([1.5, -0.5, -0.5, -0.5, -1, 0, 1, 0, 0], abs=1e-5)
    assert [row.group_index for row in rows] == [0] * 4 + [1] * 3 + [2] * 2
    assert [row.episode_index for row in rows] == [row.microbatch_key for row in rows] == list(range(9))


def test_an_episode_without_a_reward_is_in_no_mean():
    learner = GRPO(GRPOConfig(name="grpo"))
    assert advantages(learner.prepare(number_rows([group(1, None, 3, 2)]))) == advantages(
        learner.prepare(number_rows([group(1, 3, 2)]))
    )


def test_rows_of_an_episode_share_its_advantage_and_its_index():
    two = group(0.0, 1.0)
    two.episodes[1] = episode(1.0, n_rows=3)
    rows = GRPO(GRPOConfig(name="grpo")).prepare(number_rows([two]))
    assert [row.episode_index for row in rows] == [0, 1, 1, 1]
    assert advantages(rows) == pytest.approx([-(2**-0.5)] + [2**-0.5] * 3, rel=1e-5)


@settings(max_examples=30)
@given(st.permutations(range(5)))
def test_order_within_a_group_does_not_matter(order):
    rewards = [0.0, 0.25, 0.5, 0.5, 1.0]
    moved = standardize([rewards[i] for i in order], 1e-6)
    assert moved == [standardize(rewards, 1e-6)[i] for i in order]


def test_needs_two_members():
    assert GRPO.min_group_size == 2
