"""KL estimators against their formulas in float64 and against the KL they estimate; the controller by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.losses import kl_estimate
from envgym.learners.policy_gradient import adapt_kl_coef

LOGPROBS = st.floats(-30, 0)


def estimate(logprob, reference, estimator):
    return kl_estimate(*torch.tensor([[logprob], [reference]], dtype=torch.float64), estimator).item()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_by_hand(estimator, expected):
    """pi = 1/2, pi_ref = 1/4: l = log 2."""
    assert estimate(math.log(0.5), math.log(0.25), estimator) == pytest.approx(expected, rel=1e-6)


@given(LOGPROBS, LOGPROBS, st.sampled_from(["k1", "k2", "k3"]))
def test_are_the_papers_formulas(papers, logprob, reference, estimator):
    expected = papers.kl(papers.Token(new=logprob, reference=reference), estimator)
    assert estimate(logprob, reference, estimator) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(LOGPROBS, LOGPROBS)
def test_k3_is_never_negative_and_zero_where_the_two_agree(logprob, reference):
    # Within rounding: where l is tiny, exp(-l) - 1 and l cancel.
    assert estimate(logprob, reference, "k3") >= -1e-15
    assert estimate(logprob, logprob, "k3") == 0


def test_k1_and_k3_average_to_the_kl():
    """Summed over the vocabulary with pi as weights, both are KL(pi || ref) exactly."""
    pi, ref = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.25, 0.25, 0.25, 0.25])
    kl = float((pi * np.log(pi / ref)).sum())
    for estimator in ("k1", "k3"):
        tokens = kl_estimate(torch.from_numpy(np.log(pi)), torch.from_numpy(np.log(ref)), estimator)
        assert float((torch.from_numpy(pi) * tokens).sum()) == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [-1e4, 1e4])
def test_one_extreme_token_stays_finite(estimator, distance):
    logprobs = torch.tensor([distance], requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1), estimator).sum().backward()
    assert logprobs.grad.isfinite().all()


def test_k3_is_bounded_at_a_log_ratio_of_20():
    assert estimate(-25.0, 0.0, "k3") == pytest.approx(math.exp(20) - 1 - 25)


@pytest.mark.parametrize("log_ratio", [-1e4, -25.0, -20.5, -20.0, -19.0, -1.0, 0.0, 1.0, 25.0])
def test_the_gradient_of_k3_leads_to_the_reference_also_beyond_its_bound(log_ratio):
    """1 - exp(-l), with -l at most 20: below the reference it raises log pi, however far below."""
    logprobs = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    kl_estimate(logprobs, torch.zeros(1, dtype=torch.float64), "k3").sum().backward()
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(min(-log_ratio, 20.0)), rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "coefficient"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 0.05)),  # a tenth above it, for 5% of the horizon
        (0.09, 0.5 * (1 - 0.1 * 0.05)),
        (5.0, 0.5 * (1 + 0.2 * 0.05)),  # the error is bounded at 0.2
        (0.0, 0.5 * (1 - 0.2 * 0.05)),
        (-1.0, 0.5 * (1 - 0.2 * 0.05)),  # k1 can be negative
    ],
)
def test_the_controller(kl, coefficient):
    assert adapt_kl_coef(0.5, kl, target=0.1, horizon=1000, episodes=50) == pytest.approx(coefficient, rel=1e-12)


def test_a_coefficient_stays_positive_however_many_episodes_a_step_has():
    assert adapt_kl_coef(0.5, 0.0, target=0.1, horizon=10, episodes=1000) == 0.0


def test_the_controller_finds_the_coefficient_that_keeps_the_target():
    """A policy whose KL is 0.02 / coefficient settles at 0.2."""
    coefficient = 1.0
    for _ in range(400):
        coefficient = adapt_kl_coef(coefficient, 0.02 / coefficient, target=0.1, horizon=1000, episodes=256)
    assert coefficient == pytest.approx(0.2, rel=0.01)
