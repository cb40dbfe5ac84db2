"""KL estimators against their formulas in float64, and against the KL they estimate."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.kl import kl_estimate

LOGPROBS = st.floats(-30, 0)


def estimate(logprob, reference, estimator):
    return kl_estimate(torch.tensor([logprob]).double(), torch.tensor([reference]).double(), estimator).item()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))],
)
def test_by_hand(estimator, expected):
    """pi = 1/2, pi_ref = 1/4: l = log 2."""
    assert estimate(math.log(0.5), math.log(0.25), estimator) == pytest.approx(expected, rel=1e-6)


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
