"""Reward models and process reward models: where the head is read, the losses by hand, statistics."""

import math

import numpy as np
import pytest
import torch

from envgym.learner import LearnerConfig, Outputs, pad
from envgym.learners.process_reward_model import ProcessRewardModel
from envgym.learners.reward_model import RewardModelConfig, RewardModelLearner
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, StopReason, Task, Turn, number_rows

CPU = torch.device("cpu")
NAN = float("nan")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def answer(reward, n, margin=0.0):
    row = Row([Segment("prompt", [1, 2]), Segment("action", [5] * n)], Objective.CROSS_ENTROPY)
    return Episode("e", Task("t"), Outcome.finish(), [row], reward, metrics={"margin": margin} if margin else {})


def pair(n, m, margin=0.0):
    return Group("g", Task("t"), [answer(1.0, n, margin), answer(0.0, m, margin)])


def values(rows, rewards):
    """A head that says NaN everywhere but at the token where it is read."""
    batch = pad(rows, CPU)
    said = torch.full(batch.token_ids.shape, NAN)
    said[torch.arange(len(rows)), [len(row.token_ids) - 1 for row in rows]] = torch.tensor(rewards)
    return batch, said.requires_grad_()


@pytest.mark.parametrize("margin", [False, True])
def test_the_head_is_read_at_the_last_token_and_pairs_are_ranked(margin):
    learner = RewardModelLearner(RewardModelConfig(name="reward_model", margin=margin))
    rows = learner.prepare(number_rows([pair(3, 1, 0.5), pair(1, 4, 1.0)]))
    batch, said = values(rows, [2.0, 0.5, -1.0, 1.0])
    normalizers = learner.loss_normalizers(rows)
    loss, metrics = learner.loss("actor", Outputs(values=said), batch, normalizers)
    margins = (0.5, 1.0) if margin else (0.0, 0.0)
    expected = -math.log(sigmoid(1.5 - margins[0])) - math.log(sigmoid(-2.0 - margins[1]))
    assert loss.item() == pytest.approx(expected / 2, rel=1e-6)
    assert metrics["preference/accuracy"] == (1.0, 2.0)
    assert metrics["preference/reward_mean"] == (2.5, 4.0)
    loss.backward()
    assert (said.grad != 0).sum() == 4
    assert said.grad[0, 4].item() == pytest.approx(-sigmoid(-(1.5 - margins[0])) / 2, rel=1e-5)


def test_held_out_pairs_give_accuracy_and_statistics():
    learner = RewardModelLearner(RewardModelConfig(name="reward_model"))
    rows = learner.prepare(number_rows([pair(1, 1), pair(1, 1)]))
    found = learner.evaluate(rows, [np.array([9, 9, value], np.float32) for value in (2.0, 0.0, 1.0, 3.0)])
    assert (found["eval/accuracy"], found["eval/margin"]) == (0.5, 0.0)
    assert (found["eval/reward_mean"], found["eval/reward_std"]) == (1.5, pytest.approx(math.sqrt(1.25)))


def solution(*labels):
    """A solution of steps of two tokens each."""
    segments = [Segment("prompt", [1, 2]), *(Segment("action", [5, 6]) for _ in labels)]
    row = Row(segments, Objective.CROSS_ENTROPY, [Turn(label, StopReason.STOP) for label in labels])
    return Group("g", Task("t"), [Episode("e", Task("t"), Outcome.finish(), [row])])


def test_each_step_is_judged_at_its_end():
    learner = ProcessRewardModel(LearnerConfig(name="process_reward_model"))
    rows = learner.prepare(number_rows([solution(1.0, None, 0.0), solution(0.25), solution(None)]))
    assert len(rows) == 2
    batch = pad(rows, CPU)
    assert batch.loss_weights.tolist() == [[0, 0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 0, 0]]
    said = torch.full(batch.token_ids.shape, NAN)
    said[0, 3], said[0, 7], said[1, 3] = 1.0, 2.0, -1.0
    loss, metrics = learner.loss("actor", Outputs(values=said), batch, learner.loss_normalizers(rows))
    expected = -math.log(sigmoid(1.0)) - math.log(sigmoid(-2.0))
    expected += -0.25 * math.log(sigmoid(-1.0)) - 0.75 * math.log(sigmoid(1.0))
    assert loss.item() == pytest.approx(expected / 3, rel=1e-6)
    assert metrics["step/accuracy"] == (2.0, 3.0)
    outputs = [line.numpy()[: len(row.token_ids)] for line, row in zip(said, rows, strict=True)]
    assert learner.evaluate(rows, outputs) == {
        "eval/loss": pytest.approx(expected / 3, rel=1e-6), "eval/accuracy": pytest.approx(2 / 3)
    }  # fmt: skip


def test_without_held_out_pairs_the_statistics_are_those_of_the_last_step():
    """The head's numbers at the answers' last tokens, in the first pass; an evaluation's are better."""
    learner = RewardModelLearner(RewardModelConfig(name="reward_model"))
    rows = learner.prepare(number_rows([pair(1, 1), pair(1, 1)]))
    learner.end_step(rows)
    assert learner.model_config_extras() == {}
    for row, value in zip(rows, (2.0, 0.0, 1.0, 3.0), strict=True):
        row.first_outputs = np.array([9, 9, value], np.float32)
    learner.end_step(rows)
    assert learner.model_config_extras() == {"mean": 1.5, "std": pytest.approx(math.sqrt(1.25))}
    learner.evaluate(rows, [np.array([9, 9, value], np.float32) for value in (1.0, 1.0, 1.0, 1.0)])
    learner.end_step(rows)
    assert learner.model_config_extras() == {"mean": 1.0, "std": 0.0}
