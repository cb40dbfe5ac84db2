"""The correction of the gap between sampler and trainer: tables by hand, and what is dropped."""

import math

import pytest
import torch

from envgym.learners.losses import episode_means, importance_weights
from envgym.learners.policy_gradient import CorrectionConfig

NAN, INF = float("nan"), float("inf")


def corrected(kind, ratios, *, weights=None, episodes=None, low=0.5, high=2.0):
    """Factors and what is kept, for rows of ratios pi_trainer / pi_sampler."""
    ratios = torch.tensor(ratios).double()
    weights = torch.ones_like(ratios) if weights is None else torch.tensor(weights).double()
    episodes = torch.arange(len(ratios)) if episodes is None else torch.tensor(episodes)
    config = CorrectionConfig(kind=kind, low=low, high=high)
    factors, kept = importance_weights(ratios.log(), torch.zeros_like(ratios), weights, episodes, config)
    return factors.tolist(), kept.tolist()


def test_tis_truncates():
    factors, kept = corrected("tis", [[0.1, 0.5, 1.0, 2.0, 3.0, INF]])
    assert factors == [pytest.approx([0.1, 0.5, 1.0, 2.0, 2.0, 2.0])]
    assert kept == [[True] * 6]


def test_icepop_drops_what_is_out_of_bounds():
    factors, kept = corrected("icepop", [[0.1, 0.51, 1.0, 1.99, 3.0, INF, 0.0, NAN]])
    assert kept == [[False, True, True, True, False, False, False, False]]
    assert factors == [pytest.approx([0, 0.51, 1.0, 1.99, 0, 0, 0, 0])]


def test_the_sequence_mask_goes_by_the_geometric_mean_and_truncates_tokens():
    """(4 * 0.5) ^ 1/2 = 1.41 stays, with 4 cut to 2; (4 * 2) ^ 1/2 and (0.1 * 1) ^ 1/2 go."""
    factors, kept = corrected("seq_mask_tis", [[4.0, 0.5], [4.0, 2.0], [0.1, 1.0]])
    assert kept == [[True, True], [False, False], [False, False]]
    assert factors == [pytest.approx([2.0, 0.5]), [0, 0], [0, 0]]


def test_the_sequence_is_the_episode_of_all_its_rows():
    """Each row by itself would go; together they are 4 * 0.25 = 1."""
    _, kept = corrected("seq_mask_tis", [[4.0], [7.0], [0.25]], episodes=[3, 4, 3])
    assert kept == [[True], [False], [True]]


def test_masked_tokens_are_in_no_mean():
    """1 stays and 3 goes, whatever stands beside it."""
    weights = [[1.0, 0.0, 0.0]] * 2
    _, kept = corrected("seq_mask_tis", [[1.0, 100.0, NAN], [3.0, 1.0, NAN]], weights=weights)
    assert kept == [[True, False, False], [False] * 3]


@pytest.mark.parametrize("bad", [NAN, INF, 0.0])
def test_what_is_no_number_stays_in_its_episode(bad):
    factors, kept = corrected("seq_mask_tis", [[1.0, bad], [1.0, 1.5]])
    assert kept == [[False, False], [True, True]]
    assert factors == [[0, 0], pytest.approx([1.0, 1.5])]


def test_without_a_sampler_gap_nothing_happens():
    for kind in ("tis", "icepop", "seq_mask_tis"):
        assert corrected(kind, [[1.0, 1.0]]) == ([[1.0, 1.0]], [[True, True]])


def test_factors_have_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    config = CorrectionConfig(kind="tis")
    factors, _ = importance_weights(old, torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1), config)
    assert not factors.requires_grad


def test_means_of_episodes():
    values = torch.tensor([[1.0, 2.0], [10.0, 0.0], [6.0, 0.0], [0.0, 0.0]])
    weights = torch.tensor([[1.0, 1.0], [0.5, 0.0], [1.0, 0.0], [0.0, 0.0]])
    means = episode_means(values, weights, torch.tensor([0, 1, 0, 2]))
    assert means.tolist() == pytest.approx([3.0, 10.0, 3.0, 0.0])
    assert math.isnan(episode_means(values * NAN, weights, torch.tensor([0, 1, 0, 2]))[0])
