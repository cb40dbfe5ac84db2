"""Advantages that are a reward against those of a group, by hand and by the papers' formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.advantages import mean_of
from envgym.registry import load_component

REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9)
COMPARED = ("rloo", "reinforce++_baseline", "dr_grpo", "grpo")


def compare(name, rewards):
    kind = load_component("learner", name)
    return list(kind(kind.Config(name=name)).advantages(rewards))


def test_by_hand():
    """1, 2, 6: mean 3; the others' means 4, 3.5 and 1.5. n / (n - 1) times the first is the second."""
    rewards = [1.0, 2.0, 6.0]
    assert compare("reinforce++", rewards) == [1.0, 2.0, 6.0]
    assert compare("reinforce++_baseline", rewards) == compare("dr_grpo", rewards) == [-2.0, -1.0, 3.0]
    assert compare("rloo", rewards) == [-3.0, -1.5, 4.5]
    assert compare("grpo", rewards) == pytest.approx(np.array([-2.0, -1.0, 3.0]) / 7**0.5, rel=1e-5)


@pytest.mark.parametrize("name", COMPARED)
@given(rewards=REWARDS)
def test_are_the_papers_formulas(papers, name, rewards):
    np.testing.assert_allclose(compare(name, rewards), papers.group_advantages(name, rewards), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", COMPARED)
@given(reward=st.floats(-1e3, 1e3), n=st.integers(2, 16))
def test_no_variance_gives_exactly_0(name, reward, n):
    assert compare(name, [reward] * n) == [0.0] * n


@given(REWARDS)
def test_leave_one_out_is_the_centred_reward_stretched(rewards):
    n = len(rewards)
    stretched = n / (n - 1) * np.array(compare("dr_grpo", rewards))
    np.testing.assert_allclose(compare("rloo", rewards), stretched, rtol=1e-6, atol=1e-6)


def test_the_mean_of_equal_rewards_is_theirs():
    assert mean_of([0.1] * 10) == 0.1


def test_a_mean_is_not_lost_with_the_sum():
    assert mean_of([1.5e308, 1.0e308, 0.5e308]) == pytest.approx(1e308)


@pytest.mark.parametrize("name", COMPARED)
def test_groups_need_two_members(name):
    assert load_component("learner", name).min_group_size == 2


@pytest.mark.parametrize("name", ["ppo", "reinforce++"])
def test_no_group_is_needed_without_a_baseline_from_one(name):
    assert load_component("learner", name).min_group_size == 1
