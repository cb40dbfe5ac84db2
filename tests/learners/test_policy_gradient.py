"""The clipped loss and how it is averaged, against float64 NumPy written from the formulas, not from the code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envgym.learner import LearnRow, Outputs
from envgym.learners.grpo import GRPO, GRPOConfig
from envgym.learners.policy_loss import clipped_policy_loss
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task
from envgym.workers.layout import pad

CPU = torch.device("cpu")


def learner(**settings):
    return GRPO(GRPOConfig(name="grpo", **settings))


def make_groups(seed, lengths, rows_of_episode=1, weights=False):
    """Groups of two episodes with opposite rewards, prompts of two tokens and `lengths` sampled ones, as learn rows
    with random old and reference log-probabilities; and what the model says of each row ([T])."""
    rng = np.random.default_rng(seed)
    groups = []
    for start in range(0, len(lengths), 2):
        episodes = []
        for member, n in enumerate(lengths[start : start + 2]):
            rows = []
            for _ in range(rows_of_episode):
                action = Segment("action", [7] * n, logprobs=rng.normal(-2, 0.5, n).tolist())
                if weights:
                    action.weights = rng.choice([0.0, 0.5, 1.0], n).tolist()
                rows.append(
                    Row([Segment("prompt", [1, 2]), action], outputs={"reference": rng.normal(-2, 0.5, n + 2).tolist()})
                )
            episodes.append(Episode("e", Task("t"), Outcome.completed(), rows=rows, reward=float(member)))
        groups.append(Group("g", Task("t"), episodes))
    outputs = [rng.normal(-2, 0.7, n + 2).astype(np.float32) for n in lengths for _ in range(rows_of_episode)]
    return groups, outputs


def loss_and_gradients(learner, rows, outputs, cut=None, length=None):
    """The step's loss and its gradient for each row's outputs ([T] each), computed in micro-batches of `cut` rows
    padded to `length`."""
    denominators = learner.denominators(rows)
    cut = cut or len(rows)
    total, gradients = 0.0, []
    for start in range(0, len(rows), cut):
        part = rows[start : start + cut]
        batch = pad(part, CPU, length)
        leaf = torch.zeros(batch.token_ids.shape)
        for line, output in zip(leaf, outputs[start : start + cut], strict=True):
            line[: len(output)] = torch.from_numpy(output)
        leaf.requires_grad_()
        loss, _ = learner.loss("actor", Outputs(leaf, -leaf), batch, denominators)
        loss.backward()
        total += loss.item()
        gradients += [line[: len(row.token_ids)].numpy() for line, row in zip(leaf.grad, part, strict=True)]
    return total, gradients


def expected_loss(rows, raw_weights, outputs, aggregation, kl_coef, clip=(0.2, 0.3), constant_length=10):
    """ALGORITHMS.md, token by token, in float64."""
    per_episode, per_token, n_tokens = {}, 0.0, 0.0
    for row, weights_of_row, output in zip(rows, raw_weights, outputs, strict=True):
        for t, weight in enumerate(weights_of_row):
            if weight == 0:
                continue
            advantage, new = float(row.arrays["advantages"][t]), float(output[t])
            ratio = np.exp(new - float(row.old_logprobs[t]))
            token = -min(advantage * ratio, advantage * np.clip(ratio, 1 - clip[0], 1 + clip[1]))
            log_ratio = new - float(row.arrays["reference"][t])
            token += kl_coef * (np.exp(-log_ratio) - 1 + log_ratio)
            total, weights = per_episode.get(row.episode, (0.0, 0.0))
            per_episode[row.episode] = (total + weight * token, weights + weight)
            per_token += weight * token
            n_tokens += weight
    episodes = {row.episode for row in rows}
    if aggregation == "token":
        return per_token / n_tokens
    if aggregation == "constant":
        return per_token / (len(episodes) * constant_length)
    return sum(total / weights for total, weights in per_episode.values()) / len(episodes)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("shape", [{"rows_of_episode": 1}, {"rows_of_episode": 3}, {"weights": True}])
def test_loss_is_the_formula(aggregation, kl_coef, shape):
    grpo = learner(aggregation=aggregation, kl={"coef": kl_coef}, clip_low=0.2, clip_high=0.3, constant_length=10)
    groups, outputs = make_groups(1, [3, 5, 1, 8], **shape)
    as_written = [row.weights for group in groups for episode in group.episodes for row in episode.rows]
    rows = grpo.prepare(groups)
    loss, _ = loss_and_gradients(grpo, rows, outputs)
    assert loss == pytest.approx(expected_loss(rows, as_written, outputs, aggregation, kl_coef), rel=1e-5)


def test_sequence_aggregation_counts_an_episode_once_however_many_rows_it_has():
    """Two episodes of advantage -+0.707, one of one token, one of two rows and nine: at ratio 1 both weigh the same."""
    groups, _ = make_groups(0, [1, 9])
    groups[0].episodes[1].rows.append(make_groups(2, [4, 4])[0][0].episodes[0].rows[0])
    grpo = learner(aggregation="sequence")
    rows = grpo.prepare(groups)
    outputs = [np.nan_to_num(row.old_logprobs) for row in rows]
    loss, gradients = loss_and_gradients(grpo, rows, outputs)
    assert loss == pytest.approx(0, abs=1e-6)
    assert gradients[0].sum() == pytest.approx(2**-0.5 / 2, rel=1e-4)
    assert gradients[1].sum() + gradients[2].sum() == pytest.approx(-(2**-0.5) / 2, rel=1e-4)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=8).filter(lambda lengths: len(lengths) % 2 == 0),
    st.integers(1, 8),
    st.integers(0, 9),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from([0.0, 0.3]),
)
def test_gradient_depends_neither_on_padding_nor_on_micro_batches(lengths, cut, padding, aggregation, kl_coef):
    grpo = learner(aggregation=aggregation, kl={"coef": kl_coef})
    groups, outputs = make_groups(3, lengths)
    rows = grpo.prepare(groups)
    whole, expected = loss_and_gradients(grpo, rows, outputs)
    pieces, gradients = loss_and_gradients(grpo, rows, outputs, cut, max(lengths) + 2 + padding)
    assert pieces == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for one, other in zip(expected, gradients, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kl", [{}, *({"kl": {"coef": 0.1, "estimator": name}} for name in ("k1", "k2", "k3"))])
def test_nothing_at_a_masked_place_reaches_loss_or_gradient(bad, kl):
    """Whatever stands where nothing counts (prompt, padding), in the model's outputs as in what is given."""
    grpo = learner(**kl)
    groups, outputs = make_groups(4, [2, 5])
    rows = grpo.prepare(groups)
    expected = loss_and_gradients(grpo, rows, outputs, length=9)
    denominators = grpo.denominators(rows)
    batch = pad(rows, CPU, 9)
    leaf = torch.full(batch.token_ids.shape, bad)
    for line, output in zip(leaf, outputs, strict=True):
        line[2 : len(output)] = torch.from_numpy(output[2:])
    leaf.requires_grad_()
    masked = batch.weights == 0
    batch.old_logprobs[masked] = bad
    for array in batch.arrays.values():
        array[masked] = bad
    loss, metrics = grpo.loss("actor", Outputs(leaf, -leaf), batch, denominators)
    loss.backward()
    assert loss.item() == pytest.approx(expected[0], rel=1e-6)
    assert (leaf.grad[masked] == 0).all()
    for line, gradient in zip(leaf.grad, expected[1], strict=True):
        np.testing.assert_allclose(line[: len(gradient)].numpy(), gradient, rtol=1e-5)
    assert all(np.isfinite(number) for pair in metrics.values() for number in pair)


@pytest.mark.parametrize("distance", [1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_are_finite(distance, advantage):
    new = torch.tensor([distance], requires_grad=True)
    losses, *_ = clipped_policy_loss(new, torch.tensor([advantage]), 0.2, 0.2)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert new.grad.isfinite().all()


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
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    """clip_low 0.2, clip_high 0.3: ratios are bounded to [0.8, 1.3]."""
    new = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    losses, low, high = clipped_policy_loss(new, torch.tensor([advantage]).double(), 0.2, 0.3)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(gradient)
    assert (low | high).item() == (gradient == 0.0)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_group_without_variance_moves_nothing(aggregation):
    grpo = learner(aggregation=aggregation)
    groups, outputs = make_groups(5, [3, 4])
    for episode in groups[0].episodes:
        episode.reward = 0.1
    loss, gradients = loss_and_gradients(grpo, grpo.prepare(groups), outputs)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_an_episode_without_action_tokens_counts_as_an_episode_and_divides_by_nothing():
    grpo = learner(aggregation="sequence")
    groups, outputs = make_groups(6, [3, 4])
    groups[0].episodes[0].rows[0].segments[1].weights = [0.0] * 3
    rows = grpo.prepare(groups)
    assert grpo.denominators(rows) == {Objective.POLICY_GRADIENT: 2.0}
    loss, gradients = loss_and_gradients(grpo, rows, outputs)
    assert np.isfinite(loss)
    assert not gradients[0].any()


def test_a_kl_coefficient_of_0_needs_no_reference_model():
    assert set(learner().roles) == {"actor"}
    roles = learner(kl={"coef": 0.01}).roles
    assert set(roles) == {"actor", "reference"}
    assert not roles["reference"].trained
    assert roles["reference"].scored


def test_metrics_by_hand():
    """Two tokens of one row: ratios 1 and 1.5, advantage 1; only the second is clipped."""
    row = LearnRow(
        token_ids=np.array([1, 2, 3]),
        weights=np.array([0, 1, 1], np.float32),
        old_logprobs=np.array([np.nan, -1.0, -2.0], np.float32),
        objective=Objective.POLICY_GRADIENT,
        arrays={"advantages": np.ones(3, np.float32)},
    )
    outputs = torch.tensor([[0.0, -1.0, -2.0 + np.log(1.5)]])
    _, metrics = learner(aggregation="token").loss(
        "actor", Outputs(outputs, -outputs), pad([row], CPU), {Objective.POLICY_GRADIENT: 2.0}
    )
    assert metrics["policy/clip_fraction"] == (1.0, 2.0)
    assert metrics["policy/entropy"] == (pytest.approx(3 - np.log(1.5)), 2.0)
    assert metrics["loss"] == (pytest.approx(-1 - 1.2), 2.0)
