"""Advantages brought to mean 0 and deviation 1, over the tokens of the rollout or of a group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.advantages import no_signal_masks, normalize_advantages
from envgym.registry import load_component
from envgym.types import Episode, Group, Outcome, Row, Segment, StopReason, Task, Turn, number_rows

GROUPS = [[np.array([1.0, 1.0]), np.array([3.0])], [np.array([5.0, 5.0, 5.0])]]


def flat(groups):
    return [list(map(float, episode)) for group in groups for episode in group]


def test_batch_by_hand():
    """1, 1, 3, 5, 5, 5: mean 10/3, variance (2 * 49 + 1 + 3 * 25) / 9 / 6 = 174/54. Long episodes count for more."""
    std = (174 / 54) ** 0.5
    expected = [[-7 / 3 / std] * 2, [-1 / 3 / std], [5 / 3 / std] * 3]
    assert flat(normalize_advantages(GROUPS, "batch")) == [pytest.approx(episode, rel=1e-6) for episode in expected]


def test_group_by_hand():
    """1, 1, 3: mean 5/3, variance (4 + 4 + 16) / 9 / 3 = 8/9. The other group does not vary."""
    std = (8 / 9) ** 0.5
    expected = [[-2 / 3 / std] * 2, [4 / 3 / std], [0.0] * 3]
    assert flat(normalize_advantages(GROUPS, "group")) == [pytest.approx(episode, rel=1e-6) for episode in expected]


def test_the_mean_of_a_batch_alone_by_hand():
    """1, 1, 3, 5, 5, 5: mean 10/3. The spread stays."""
    expected = [[-7 / 3] * 2, [-1 / 3], [5 / 3] * 3]
    assert flat(normalize_advantages(GROUPS, "batch_mean")) == [
        pytest.approx(episode, rel=1e-12) for episode in expected
    ]


def test_none_changes_nothing():
    assert flat(normalize_advantages(GROUPS, "none")) == flat(GROUPS)


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=1, max_size=6))
def test_is_the_formula(papers, episodes):
    tokens = [token for episode in episodes for token in episode]
    [result] = normalize_advantages([[np.array(episode, np.float64) for episode in episodes]], "batch")
    if len(set(tokens)) < 2:
        assert not any(episode.any() for episode in result)
    else:
        np.testing.assert_allclose(np.concatenate(result), papers.normalised(tokens), atol=1e-9)


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("n", range(1, 12))
def test_equal_advantages_become_exactly_0(scope, n):
    """0.1, whose mean over three tokens is not 0.1 in floating point."""
    assert flat(normalize_advantages([[np.full(n, 0.1), np.full(3, 0.1)]], scope)) == [[0.0] * n, [0.0] * 3]


def episode(turns, segments):
    """An episode that is paid `turns`, each for as many tokens as `segments` says."""
    row = Row([Segment("prompt", [1])], turns=[Turn(paid, StopReason.STOP) for paid in turns])
    for length in segments:
        row.segments += [Segment("action", [2] * length, logprobs=[-0.1] * length), Segment("feedback", [3])]
    return Episode("e", Task("t"), Outcome.finish(), rows=[row], reward=float(sum(turns)))


def prepared(name, *groups, **settings):
    """For each episode of each group its tokens' advantages."""
    kind = load_component("learner", name)
    learner = kind(kind.Config(name=name, **settings))
    rows = iter(learner.prepare(number_rows([Group(str(n), Task("t"), episodes) for n, episodes in enumerate(groups)])))
    return [
        [own.arrays["advantages"][own.loss_weights > 0].tolist() for own in [next(rows) for _ in of]] for of in groups
    ]


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("name", ["reinforce++_baseline", "grpo", "rloo", "dr_grpo"])
def test_a_group_without_variance_is_moved_by_nothing(name, scope):
    """The long wrong answer pulls the tokens' mean below 0: without more, every group that says nothing is praised."""
    mixed = [episode([1.0], [2]), episode([0.0], [20])]
    for reward in (0.0, 1.0):
        same = [episode([reward], [3]), episode([reward], [5])]
        right, settled = prepared(name, mixed, same, advantage_norm=scope)
        assert settled == [[0.0] * 3, [0.0] * 5]
        assert right[0][0] > 0 > right[1][0]


def test_so_is_a_turn_without_variance():
    """Both were paid 1 for their second turn; from the first turn on they earned 1 and 3."""
    [[one, other]] = prepared(
        "reinforce++_baseline", [episode([0.0, 1.0], [2, 3]), episode([2.0, 1.0], [9, 4])], credit="turn"
    )
    assert one[2:] + other[9:] == [0.0] * 7
    assert one[0] < 0 < other[0]


def test_one_member_with_an_advantage_gives_the_turn_variance():
    """Of three members the third is at the mean: its tokens count all the same. The second turn has no variance, and
    the third is reached by one member alone."""
    group = [np.array([1.0, 1.0, 0.0, 0.0]), np.array([-1.0, 0.0]), np.array([0.0, 0.0, 0.0, 0.5])]
    masks = no_signal_masks(group, [[2, 4], [1, 2], [2, 3, 4]])
    assert [mask.tolist() for mask in masks] == [
        [False, False, True, True],
        [False, True],
        [False, False, True, False],
    ]
    assert no_signal_masks([], []) == []


def test_without_a_baseline_from_the_group_equal_rewards_say_something():
    """All of one group are wrong, all of the other right: that is what REINFORCE++ goes by."""
    wrong, right = prepared("reinforce++", [episode([0.0], [3])] * 2, [episode([1.0], [3])] * 2, kl={"coef": 0.0})
    assert wrong[0][0] == pytest.approx(-1, rel=1e-6)
    assert right[0][0] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("scope", ["batch", "group", "none"])
def test_nothing_to_normalise(scope):
    assert normalize_advantages([], scope) == []
    assert flat(normalize_advantages([[np.zeros(0)]], scope)) == [[]]
