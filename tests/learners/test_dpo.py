"""DPO, IPO and cDPO: pairs, the loss by hand, and what must not change it."""

import math

import numpy as np
import pytest
import torch
from scored_rows import ScoredRow, scored

from envgym.learner import Outputs, pad
from envgym.learners.dpo import DPO, DPOConfig
from envgym.types import Episode, Group, Objective, Outcome, Segment, Task
from envgym.workers.micro_batches import padding_samples

CPU = torch.device("cpu")
NAN = float("nan")


def make(**settings):
    return DPO(DPOConfig(name="dpo", **{"beta": 0.5, **settings}))


def answer(reward, references):
    """Two prompt tokens and an answer of which the reference model says these log-probabilities."""
    segments = [Segment("prompt", [1, 2]), Segment("action", [5] * len(references))]
    row = ScoredRow(segments, Objective.CROSS_ENTROPY, outputs={"reference": [NAN, NAN, *references]})
    return Episode("e", Task("t"), Outcome.finish(), rows=[row], reward=reward)


def group(*members):
    return Group("g", Task("t"), list(members))


PAIR = group(answer(1.0, [-1.0, -2.0]), answer(0.0, [-3.0]))
OTHER = group(answer(0.0, [-1.0]), answer(1.0, [-1.5, -0.5, -1.0]))


def step(learner, groups, logprobs):
    """(rows, outputs): the policy's log-probabilities of each row's answer, chosen before rejected."""
    rows = learner.prepare(scored(groups))
    return rows, [np.array([NAN, NAN, *own], np.float32) for own in logprobs]


def test_identical_pairs_are_left_out_and_counted():
    """As after truncation, before the answers differ."""
    same = group(answer(1.0, [-1.0, -2.0]), answer(0.0, [-3.0, -1.0]))
    learner = make()
    samples = learner.prepare(scored([PAIR, same, OTHER]))
    assert [len(sample) for sample in samples] == [4, 3, 5, 3]
    assert learner.metrics(samples) == {"preference/pairs": 2, "preference/identical": 1}
    samples = learner.prepare(scored([PAIR, OTHER]))
    assert learner.metrics(samples) == {"preference/pairs": 2}
    assert len(learner.prepare(scored([same]))) == 2  # a step has samples


def test_a_step_of_equal_rewards_has_a_loss_without_a_gradient():
    rows, outputs = step(make(), [group(answer(0.0, [-1.0, -2.0]), answer(0.0, [-3.0, -1.0]))], [[-2.0, -2.5]] * 2)
    assert [row.arrays["chosen"][0] for row in rows] == [1.0, 0.0]
    assert loss_of(make(), rows, outputs)[0] == pytest.approx(math.log(2))


def test_a_member_without_rows_is_in_no_pair():
    """One that failed before its first turn, with `rollout.failed_reward`."""
    rowless = Episode("e", Task("t"), Outcome.fail("environment", "broken"), rows=[], reward=-1.0)
    assert [len(row) for row in make().prepare(scored([group(*PAIR.episodes, rowless)]))] == [4, 3]


def loss_of(learner, rows, outputs, cut=None):
    normalizers = learner.loss_normalizers(rows)
    total, summed = 0.0, {}
    cut = cut or len(rows)
    for start in range(0, len(rows), cut):
        part = rows[start : start + cut]
        batch = pad(part, CPU)
        values = torch.full(batch.token_ids.shape, NAN)
        for line, own in zip(values, outputs[start : start + cut], strict=True):
            line[: len(own)] = torch.from_numpy(own)
        loss, metrics = learner.loss("actor", Outputs(values), batch, normalizers)
        total += loss.item()
        for name, (a, b) in metrics.items():
            summed[name] = (summed.get(name, (0, 0))[0] + a, summed.get(name, (0, 0))[1] + b)
    return total, {name: a / b for name, (a, b) in summed.items()}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# The policy says -0.5 and -1 of the chosen answer and -4 of the rejected one: it has moved by 1.5 and by -1, so that z
# is 2.5; of the other pair by 0.6 and -1, z = 1.6.
SAID = [[-0.5, -1.0], [-4.0], [-1.2, -0.2, -1.0], [-2.0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-math.log(sigmoid(1.25)), -math.log(sigmoid(0.8))]),
        ({"label_smoothing": 0.1},
         [-0.9 * math.log(sigmoid(z)) - 0.1 * math.log(sigmoid(-z)) for z in (1.25, 0.8)]),
        ({"loss": "ipo"}, [(2.5 - 1.0) ** 2, (1.6 - 1.0) ** 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cut", [2, 4])
def test_the_loss_is_the_mean_over_the_steps_pairs(settings, expected, cut):
    learner = make(**settings)
    loss, metrics = loss_of(learner, *step(learner, [PAIR, OTHER], SAID), cut)
    assert loss == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert metrics["preference/accuracy"] == 1.0
    assert metrics["preference/margin"] == pytest.approx(0.5 * (2.5 + 1.6) / 2)
    assert metrics["reward/chosen"] == pytest.approx(0.5 * (1.5 + 0.6) / 2)


def test_the_cross_entropy_of_chosen_answers_is_a_mean_over_their_tokens():
    learner = make(nll_coef=2.0)
    without, _ = loss_of(make(), *step(make(), [PAIR, OTHER], SAID))
    loss, metrics = loss_of(learner, *step(learner, [PAIR, OTHER], SAID), cut=2)
    assert metrics["nll"] == pytest.approx((1.5 + 2.4) / 5)
    assert loss == pytest.approx(without + 2.0 * (1.5 + 2.4) / 5, rel=1e-6)


def test_of_a_sampled_group_the_best_and_the_worst_are_a_pair():
    members = [answer(0.5, [-1.0]), answer(2.0, [-2.0] * 2), answer(-1.0, [-3.0] * 3), answer(2.0, [-4.0] * 4)]
    rows = make().prepare(scored([group(*members), group(answer(1.0, [-1.0]), answer(1.0, [-1.0]))]))
    assert [len(row.token_ids) for row in rows] == [4, 5]
    assert [row.arrays["chosen"][0] for row in rows] == [1.0, 0.0]
    assert {row.microbatch_key for row in rows} == {0}


def test_only_answers_have_a_gradient_and_fillers_none():
    learner = make()
    rows, _ = step(learner, [PAIR], SAID[:2])
    batch = pad([*rows, *padding_samples(rows)], CPU)
    values = torch.where(batch.loss_weights > 0, -1.0, NAN).requires_grad_()
    loss, _ = learner.loss("actor", Outputs(values), batch, {Objective.PREFERENCE: 1.0, "nll": 1.0})
    loss.backward()
    slope = -0.5 * sigmoid(-0.5 * ((-2 + 3) - (-1 + 3)))
    expected = [[0, 0, slope, slope], [0, 0, -slope, 0], [0] * 4, [0] * 4]
    torch.testing.assert_close(values.grad, torch.tensor(expected))


def test_evaluation_is_of_pairs():
    learner = make()
    rows, outputs = step(learner, [PAIR, OTHER], [[-0.5, -1.0], [-4.0], [-3.0, -1.0, -1.0], [-1.0]])
    found = learner.evaluate(rows, outputs)
    assert found["eval/accuracy"] == 0.5
    assert found["eval/margin"] == pytest.approx(0.5 * (2.5 - 2.0) / 2)
    assert found["eval/loss"] == pytest.approx(-(math.log(sigmoid(1.25)) + math.log(sigmoid(-1.0))) / 2)


def test_ipo_smooths_no_labels():
    with pytest.raises(ValueError, match="label_smoothing is for loss=sigmoid"):
        make(loss="ipo", label_smoothing=0.1)
