"""KTO: the point of reference, the loss by hand, and what must not change it."""

import math

import numpy as np
import pytest
import torch

from envgym.learner import Outputs, pad
from envgym.learners.kto import KTO, KTOConfig
from envgym.types import Episode, Group, ImageSpan, Objective, Outcome, Row, Segment, Task, number_rows

CPU = torch.device("cpu")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def answer(prompt, tokens, reward):
    row = Row([Segment("prompt", prompt), Segment("action", tokens)], Objective.CROSS_ENTROPY)
    return Group("g", Task("t"), [Episode("e", Task("t"), Outcome.finish(), [row], reward)])


GROUPS = [answer([1, 2], [11, 12], 1.0), answer([3], [13], 0.0), answer([4, 5, 6], [14, 15, 16], 1.0)]


def prepared(learner, groups, actor, reference):
    """Rows of which these functions of a token say the log-probabilities."""
    found = number_rows(groups)
    for row in learner.rows_to_score(found):
        for name, says in (("actor", actor), ("reference", reference)):
            row.arrays[name] = np.array([says(token) for token in row.token_ids], np.float32)
    return learner.prepare(found)


def test_each_prompt_is_followed_by_the_answer_before_it():
    learner = KTO(KTOConfig(name="kto"))
    rows = learner.rows_to_score(number_rows(GROUPS))
    assert [row.token_ids.tolist() for row in rows[1::2]] == [[1, 2, 14, 15, 16], [3, 11, 12], [4, 5, 6, 13]]
    assert [row.loss_weights.tolist() for row in rows[1::2]] == [[0, 0, 1, 1, 1], [0, 1, 1], [0, 0, 0, 1]]


def test_episodes_without_an_answer_are_left_out():
    """One that failed before its first turn, and a demonstration whose turns have weight 0."""
    rowless = Group("g", Task("t"), [Episode("e", Task("t"), Outcome.fail("environment", "broken"), [], -1.0)])
    unweighted = answer([7], [17], 1.0)
    unweighted.episodes[0].rows[0].segments[1].loss_weights[0] = 0.0
    rows = prepared(KTO(KTOConfig(name="kto")), [rowless, *GROUPS, unweighted], lambda t: -1.0, lambda t: -1.0)
    assert [len(row) for row in rows] == [4, 2, 6]


def test_sampled_answers_are_scored_at_temperature_1():
    episode = answer([1, 2], [11, 12], 1.0).episodes[0]
    episode.rows[0].segments[1].temperature = 0.7
    rows = KTO(KTOConfig(name="kto")).rows_to_score(number_rows([Group("g", Task("t"), [episode])]))
    assert [row.temperatures for row in rows] == [None, None]


def test_a_prompt_has_its_images_before_any_answer():
    learner, span = KTO(KTOConfig(name="kto")), ImageSpan("ab" * 32, 1, 2)
    groups = [answer([1, 9, 9, 2], [11, 12], 1.0), answer([3], [13], 0.0)]
    groups[0].episodes[0].rows[0].segments[0].images = (span,)
    rows = learner.rows_to_score(number_rows(groups))
    assert [(row.token_ids.tolist(), row.images) for row in rows] == [
        ([1, 9, 9, 2, 11, 12], (span,)),
        ([1, 9, 9, 2, 13], (span,)),
        ([3, 13], ()),
        ([3, 11, 12], ()),
    ]


@pytest.mark.parametrize("cut", [1, 3])
def test_the_loss_by_hand(cut):
    """Mismatched answers have moved by 0.9, 0.4 and 0.2: the point of reference is 0.5."""
    learner = KTO(KTOConfig(name="kto", beta=2.0, desirable=1.5, undesirable=0.5))
    moved = {11: 0.1, 12: 0.3, 13: 0.2, 14: 0.3, 15: 0.3, 16: 0.3}
    rows = prepared(learner, GROUPS, lambda t: -3.0 + moved.get(t, 9.0), lambda t: -3.0)
    assert [set(row.arrays) for row in rows] == [{"reference", "good", "baseline"}] * 3
    assert rows[0].arrays["baseline"][0] == pytest.approx(0.5)
    now = {11: 1.0, 12: 0.0, 13: -1.0, 14: 0.5, 15: 0.5, 16: 0.5}
    total, normalizers = 0.0, learner.loss_normalizers(rows)
    for start in range(0, 3, cut):
        batch = pad(rows[start : start + cut], CPU)
        says = torch.tensor([[-3.0 + now.get(int(t), float("nan")) for t in line] for line in batch.token_ids])
        total += learner.loss("actor", Outputs(says), batch, normalizers)[0].item()
    losses = [1.5 * (1 - sigmoid(2 * (1.0 - 0.5))), 0.5 * (1 - sigmoid(2 * (0.5 + 1.0))), 1.5 * (1 - sigmoid(2 * 1.0))]
    assert total == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_a_policy_that_moved_closer_has_its_point_of_reference_at_zero():
    learner = KTO(KTOConfig(name="kto"))
    rows = prepared(learner, GROUPS, lambda t: -4.0, lambda t: -3.0)
    assert {row.arrays["baseline"][0] for row in rows} == {0.0}


def test_evaluation_asks_which_way_answers_moved():
    learner = KTO(KTOConfig(name="kto"))
    rows = prepared(learner, GROUPS, lambda t: -3.0, lambda t: -3.0)
    outputs = [
        np.full(len(row.token_ids), value, np.float32) for row, value in zip(rows, (-2.0, -2.0, -4.0), strict=True)
    ]
    found = learner.evaluate(rows, outputs)
    assert found["eval/accuracy"] == pytest.approx(1 / 3)
    moved = [sum(row.loss_weights) * by for row, by in zip(rows, (1.0, 1.0, -1.0), strict=True)]
    assert found["eval/margin"] == pytest.approx(KTOConfig(name="kto").beta * ((moved[0] + moved[2]) / 2 - moved[1]))
    assert "eval/margin" not in learner.evaluate(rows[1:2], outputs[1:2])  # there is nothing to compare it with


def test_a_step_tells_the_share_that_moved_the_right_way():
    learner = KTO(KTOConfig(name="kto"))
    rows = prepared(learner, GROUPS, lambda t: -3.0, lambda t: -3.0)
    batch = pad(rows, CPU)
    says = torch.tensor([[-2.0] * batch.token_ids.shape[1]] * 2 + [[-4.0] * batch.token_ids.shape[1]])
    metrics = learner.loss("actor", Outputs(says), batch, learner.loss_normalizers(rows))[1]
    assert metrics["preference/accuracy"] == (1.0, 3.0)
