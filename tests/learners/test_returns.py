"""Returns and generalised advantages: tables by hand, and the papers' sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.advantages import broadcast_turn_values, discounted_returns, gae_advantages, rewards_to_go

NUMBERS = st.lists(st.floats(-10, 10), max_size=8)


def test_discounted_returns_by_hand():
    """gamma 1/2: 4; 2 + 4/2; 0 + (2 + 4/2)/2."""
    assert discounted_returns(np.array([0.0, 2.0, 4.0]), 0.5).tolist() == [2.0, 4.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 1.0).tolist() == [7.0, 6.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.0).tolist() == [1.0, 2.0, 4.0]


def test_generalised_advantages_by_hand():
    """Values 1/2 throughout and a reward of 1 at the end: one difference, 1/2, which fades by 0.95 a step."""
    rewards, values = np.array([0.0, 0, 0, 1]), np.full(4, 0.5)
    advantages = gae_advantages(rewards, values, next_value=0.0, gamma=1.0, gae_lambda=0.95)
    assert advantages == pytest.approx([0.4286875, 0.45125, 0.475, 0.5], abs=1e-12)


def test_a_value_after_the_end_counts_as_what_would_have_been_earned():
    """gamma 1/2, lambda 1/2: 1 + 0.5 * 4 - 2 = 1; then 0 + 0.5 * 2 - 1 = 0, plus a quarter of 1."""
    advantages = gae_advantages(np.array([0.0, 1.0]), np.array([1.0, 2.0]), next_value=4.0, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [0.25, 1.0]


@given(NUMBERS, NUMBERS, st.floats(-5, 5), st.floats(0, 1), st.floats(0, 1))
def test_are_the_papers_sums(papers, rewards, values, next_value, gamma, lam):
    n = min(len(rewards), len(values))
    rewards, values = np.array(rewards[:n], np.float64), np.array(values[:n], np.float64)
    advantages = gae_advantages(rewards, values, next_value=next_value, gamma=gamma, gae_lambda=lam)
    np.testing.assert_allclose(advantages, papers.gae(rewards, values, next_value, gamma, lam), atol=1e-9)
    np.testing.assert_allclose(discounted_returns(rewards, gamma), papers.discounted_returns(rewards, gamma), atol=1e-9)


@given(NUMBERS, st.floats(0, 1))
def test_with_lambda_1_and_no_critic_advantages_are_returns(rewards, gamma):
    rewards = np.array(rewards, np.float64)
    advantages = gae_advantages(rewards, np.zeros_like(rewards), next_value=0, gamma=gamma, gae_lambda=1)
    np.testing.assert_allclose(advantages, discounted_returns(rewards, gamma), atol=1e-9)


def test_no_step_has_no_return():
    nothing = np.zeros(0)
    assert len(discounted_returns(nothing, 0.9)) == 0
    assert len(gae_advantages(nothing, nothing, next_value=1.0, gamma=0.9, gae_lambda=0.9)) == 0


def test_rewards_to_go_by_hand():
    """Turns of 2, 1 and 2 tokens, gamma 1/2: 4; 2 + 4/4; 1 + (2 + 4/4)/2."""
    assert rewards_to_go([1.0, 2.0, 4.0], [2, 3, 5], 0.5) == [2.5, 3.0, 4.0]
    assert rewards_to_go([1.0, 2.0, 4.0], [2, 3, 5], 1.0) == [7.0, 6.0, 4.0]
    assert rewards_to_go([], [], 0.5) == []


def test_a_turn_without_tokens_takes_no_time():
    assert rewards_to_go([1.0, 2.0, 4.0], [2, 2, 3], 0.5) == [5.0, 4.0, 4.0]


def test_spread_discounts_within_a_turn():
    assert broadcast_turn_values([8.0, -4.0], [3, 5], 0.5).tolist() == [2.0, 4.0, 8.0, -2.0, -4.0]
    assert broadcast_turn_values([8.0, 3.0, -4.0], [1, 1, 2], 1.0).tolist() == [8.0, -4.0]
    assert broadcast_turn_values([1.0, 2.0], [2, 3], 0.0).tolist() == [0.0, 1.0, 2.0]
    assert broadcast_turn_values([], [], 1.0).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), max_size=5), st.floats(0, 1))
def test_spread_rewards_to_go_are_the_discounted_returns(turns, gamma):
    """Turn by turn or token by token: the same return, wherever turns have tokens."""
    turns = [(length, reward) for length, reward in turns if length]
    ends = np.cumsum([length for length, _ in turns]).astype(int).tolist()
    rewards = np.zeros(ends[-1] if ends else 0)
    for end, (_, reward) in zip(ends, turns, strict=True):
        rewards[end - 1] = reward
    by_turn = broadcast_turn_values(rewards_to_go([reward for _, reward in turns], ends, gamma), ends, gamma)
    np.testing.assert_allclose(by_turn, discounted_returns(rewards, gamma), atol=1e-9)
