"""Policy losses of single tokens: tables by hand. `test_policy_gradient` holds whole steps against the papers."""

import math

import pytest
import torch

from envgym.errors import RunError
from envgym.learner import Outputs, RowBatch
from envgym.learners.losses import actor_loss, policy_loss_of, sequence_log_ratio
from envgym.learners.policy_gradient import PolicyGradientConfig
from envgym.types import Objective


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def losses_of(name, log_ratio, logprobs, advantages, **settings):
    """The losses of a policy loss, clipped to [0.8, 1.3] unless said otherwise, and what was clipped."""
    config = PolicyGradientConfig(name="x", policy_loss=name, **{"clip_high": 0.3, **settings})
    return policy_loss_of(name).losses(log_ratio, logprobs, advantages, config)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # Within the bounds: -A r, whose derivative for log pi is -A r.
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # Better than bounded: clipped, no gradient.
        (1.5, 2.0, -2.6, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        # Worse than bounded: the way back keeps its gradient.
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipping(ratio, advantage, loss, gradient):
    """clip_low 0.2, clip_high 0.3: ratios are bounded to [0.8, 1.3]."""
    log_ratio = double(ratio).log().requires_grad_()
    losses, low, high = losses_of("ppo", log_ratio, None, double(advantage))
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert log_ratio.grad.item() == pytest.approx(gradient)
    assert low.item() == (gradient == 0.0 and ratio < 1)
    assert high.item() == (gradient == 0.0 and ratio > 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.0, -2.0, 4.0, 4.0),  # -min(r A, …) = 4 is less than c |A| = 6
        (4.0, -2.0, 6.0, 0.0),  # and 8 is more
        (0.5, -2.0, 1.6, 0.0),
        (4.0, 2.0, -2.6, 0.0),  # a positive advantage is the clip's alone
    ],
)
def test_dual_clip(ratio, advantage, loss, gradient):
    log_ratio = double(ratio).log().requires_grad_()
    losses, *_ = losses_of("ppo", log_ratio, None, double(advantage), dual_clip=3.0)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert log_ratio.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("distance", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_are_finite(distance, advantage, dual_clip):
    log_ratio = torch.tensor([distance], requires_grad=True)
    losses, *_ = losses_of("ppo", log_ratio, None, torch.tensor([advantage]), dual_clip=dual_clip)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert log_ratio.grad.isfinite().all()


@pytest.mark.parametrize(
    ("ratio", "weight", "low", "high"),
    [(1.1, 1.1, False, False), (3.0, 1.3, False, True), (0.5, 0.8, True, False), (math.inf, 1.3, False, True)],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio, weight, low, high, advantage):
    logprobs = double(-0.7).requires_grad_()
    log_ratio = logprobs - logprobs.detach() + math.log(ratio)
    losses, was_low, was_high = losses_of("cispo", log_ratio, logprobs, double(advantage))
    losses.sum().backward()
    assert losses.item() == pytest.approx(weight * advantage * 0.7)
    assert logprobs.grad.item() == pytest.approx(-weight * advantage)
    assert (was_low.item(), was_high.item()) == (low, high)


def test_cispo_without_a_lower_bound():
    """clip_low 1: the ratio goes down to 0."""
    losses, low, _ = losses_of("cispo", double(0.01).log(), double(-1.0), double(1.0), clip_low=1.0)
    assert losses.item() == pytest.approx(0.01)
    assert not low.item()


def test_reinforce_weighs_log_pi_alone():
    logprobs = double(-0.7, -1.0).requires_grad_()
    losses, low, high = losses_of("reinforce", None, logprobs, double(2.0, -3.0))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([1.4, -3.0])
    assert logprobs.grad.tolist() == [-2.0, 3.0]
    assert not (low | high).any()


def test_the_ratio_of_an_episode_is_the_geometric_mean_over_all_its_rows():
    """Rows 0 and 2 are one episode of three tokens: (log 2 + log 2 + log 16) / 3 = log 4. Row 1 has one of its own."""
    logprobs = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double().requires_grad_()
    log_ratio = double(2, 2, 9, 3, 9, 9, 16, 9, 9).log().reshape(3, 3) + logprobs
    weights = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 0, 0]]).double()
    means = sequence_log_ratio(log_ratio, logprobs, weights, torch.tensor([5, 8, 5]))
    assert means.exp().tolist() == [pytest.approx([4] * 3), pytest.approx([3] * 3), pytest.approx([4] * 3)]
    # The sum over an episode of weights times ratio has the sequence ratio's gradient: 3 tokens x 4 x 1/3 each.
    (weights * means.exp()).sum().backward()
    assert logprobs.grad.tolist() == [pytest.approx([4, 4, 0]), pytest.approx([3, 0, 0]), pytest.approx([4, 0, 0])]


def test_weights_that_add_up_to_one_an_episode_change_no_ratio():
    """`sequence` aggregation divides an episode's weights by their sum."""
    log_ratio = double(2, 4).log()[None]
    for scale in (1.0, 0.5):
        weights = torch.full((1, 2), scale).double()
        means = sequence_log_ratio(log_ratio, log_ratio, weights, torch.tensor([0]))
        assert means.exp().tolist() == [pytest.approx([8**0.5] * 2)]


@pytest.mark.parametrize(
    ("returned", "shapes"),
    [
        ("-(advantages * logprobs).mean(), clipped, clipped", "[[], [2, 3], [2, 3]]"),
        ("-advantages * logprobs", "[[2, 3]]"),
        ("(-advantages,) * 2", "[[2, 3], [2, 3]]"),
        ("None", "[[]]"),
    ],
)
def test_losses_that_are_not_of_each_token_are_refused_with_the_authors_line(tmp_path, returned, shapes):
    file = tmp_path / "mine.py"
    text = f"""
from envgym.learners.losses import PolicyLoss

class Mine(PolicyLoss):
    def losses(self, log_ratio, logprobs, advantages, config):
        clipped = advantages > 9
        return {returned}
"""
    file.write_text(text)
    ones = torch.ones(2, 3)
    batch = RowBatch(Objective.POLICY_GRADIENT, ones.long(), ones, -ones, {"advantages": ones}, ones[:, 0], ones[:, 0])
    config = PolicyGradientConfig(name="x", policy_loss=f"{file}:Mine")
    with pytest.raises(RunError) as error:
        actor_loss(Outputs(logprobs=-ones, entropy=ones), batch, config)
    line = f"Mine.losses returned shapes {shapes}, not (losses, low, high) of [2, 3] each"
    assert str(error.value) == f"{file}, line 5: {line}"
