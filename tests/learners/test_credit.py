"""Which tokens a reward counts for."""

import pytest
from scored_rows import group_of_turns

from envgym.learners.advantages import turn_advantages
from envgym.learners.grpo import standardize
from envgym.registry import load_component
from envgym.types import number_rows


def advantages_of(name):
    kind = load_component("learner", name)
    return kind(kind.Config(name=name)).advantages


center, leave_one_out = advantages_of("dr_grpo"), advantages_of("rloo")


def test_a_turn_is_compared_with_the_members_that_reached_it():
    """Three members of 3, 2 and 1 turns. Turn 1: 6, 3, 3, mean 4. Turn 2: 5, 1, mean 3. Turn 3: one member, which
    earned 4.5 there, beside the whole episodes of the others, 3 and 3: mean 3.5."""
    to_go = [[6.0, 5.0, 4.5], [3.0, 1.0], [3.0]]
    assert turn_advantages(to_go, [6.0, 3.0, 3.0], center) == [[2.0, 2.0, 1.0], [-1.0, -2.0], [-1.0]]


def test_each_algorithm_compares_in_its_own_way():
    to_go, rewards = [[6.0, 5.0], [2.0]], [6.0, 2.0]
    assert turn_advantages(to_go, rewards, leave_one_out) == [[4.0, 3.0], [-4.0]]
    two = 0.5**0.5  # of two members one is above the mean by as much as the other is below

    def grpo(rewards):
        return standardize(rewards, 0.0)

    assert turn_advantages(to_go, rewards, grpo) == [pytest.approx([two, two]), pytest.approx([-two])]


def test_a_turn_of_the_only_member_is_compared_with_nothing():
    """REINFORCE++ has no baseline, and may have one episode per task."""
    assert turn_advantages([[6.0, 5.0]], [6.0], list) == [[6.0, 5.0]]


@pytest.mark.parametrize("compare", [center, leave_one_out, lambda rewards: standardize(rewards, 1e-6)])
def test_equal_turns_give_exactly_0(compare):
    to_go = [[0.3, 0.1], [0.3, 0.1], [0.3, 0.1]]
    assert turn_advantages(to_go, [0.3] * 3, compare) == [[0.0, 0.0]] * 3


def test_no_member_and_no_turn():
    assert turn_advantages([], [], center) == []
    assert turn_advantages([[], [1.0]], [0.0, 1.0], center) == [[], [0.5]]


def advantages(name, *members, **settings):
    kind = load_component("learner", name)
    rows = kind(kind.Config(name=name, advantage_norm="none", **settings)).prepare(
        number_rows([group_of_turns(*members)])
    )
    return [row.arrays["advantages"][row.loss_weights > 0].tolist() for row in rows]


def test_of_an_episode_or_of_a_turn():
    """Turn 1 pays the first member 1 and the second nothing; turn 2 pays 0 and 3."""
    assert advantages("dr_grpo", [1, 0], [0, 3], credit="episode") == [[-1.0] * 4, [1.0] * 4]
    assert advantages("dr_grpo", [1, 0], [0, 3], credit="turn") == [[-1, -1, -1.5, -1.5], [1, 1, 1.5, 1.5]]


def test_a_discount_fades_from_the_turn_that_earned():
    """gamma 1/2, no baseline: 4 at the end of turn 2 is 2 and 4 in it, and 1/2 and 1 in turn 1, which earned 8."""
    assert advantages("reinforce++", [8, 4], gamma=0.5, credit="turn") == [[4.5, 9.0, 2.0, 4.0]]
    assert advantages("reinforce++", [8, 4], gamma=0.5, credit="episode") == [[1.5, 3.0, 6.0, 12.0]]


@pytest.mark.parametrize("name", ["reinforce++_baseline", "rloo", "grpo", "dr_grpo", "reinforce++"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_with_one_turn_both_are_the_same(name, gamma):
    members = [[1], [0], [0.25]]
    by_turn = advantages(name, *members, credit="turn", gamma=gamma)
    assert by_turn == advantages(name, *members, credit="episode", gamma=gamma)
