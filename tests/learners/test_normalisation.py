"""Advantages brought to mean 0 and deviation 1, over the tokens of the rollout or of a group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.normalisation import normalised

GROUPS = [[np.array([1.0, 1.0]), np.array([3.0])], [np.array([5.0, 5.0, 5.0])]]


def flat(groups):
    return [list(map(float, episode)) for group in groups for episode in group]


def test_batch_by_hand():
    """1, 1, 3, 5, 5, 5: mean 10/3, variance (2 * 49 + 1 + 3 * 25) / 9 / 6 = 174/54. Long episodes count for more."""
    std = (174 / 54) ** 0.5
    expected = [[-7 / 3 / std] * 2, [-1 / 3 / std], [5 / 3 / std] * 3]
    assert flat(normalised(GROUPS, "batch")) == [pytest.approx(episode, rel=1e-6) for episode in expected]


def test_group_by_hand():
    """1, 1, 3: mean 5/3, variance (4 + 4 + 16) / 9 / 3 = 8/9. The other group does not vary."""
    std = (8 / 9) ** 0.5
    expected = [[-2 / 3 / std] * 2, [4 / 3 / std], [0.0] * 3]
    assert flat(normalised(GROUPS, "group")) == [pytest.approx(episode, rel=1e-6) for episode in expected]


def test_none_changes_nothing():
    assert flat(normalised(GROUPS, "none")) == flat(GROUPS)


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=1, max_size=6))
def test_is_the_formula(papers, episodes):
    tokens = [token for episode in episodes for token in episode]
    [result] = normalised([[np.array(episode, np.float64) for episode in episodes]], "batch")
    if len(set(tokens)) < 2:
        assert not any(episode.any() for episode in result)
    else:
        np.testing.assert_allclose(np.concatenate(result), papers.normalised(tokens), atol=1e-9)


@pytest.mark.parametrize("scope", ["batch", "group"])
@pytest.mark.parametrize("n", range(1, 12))
def test_equal_advantages_become_exactly_0(scope, n):
    """0.1, whose mean over three tokens is not 0.1 in floating point."""
    assert flat(normalised([[np.full(n, 0.1), np.full(3, 0.1)]], scope)) == [[0.0] * n, [0.0] * 3]


@pytest.mark.parametrize("scope", ["batch", "group", "none"])
def test_nothing_to_normalise(scope):
    assert normalised([], scope) == []
    assert flat(normalised([[np.zeros(0)]], scope)) == [[]]
