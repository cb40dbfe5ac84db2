"""Supervised fine-tuning: the loss by hand, and what must not change it."""

import numpy as np
import pytest
import torch

from envgym.learner import Outputs, pad
from envgym.learners.sft import SFT, SFTConfig
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task, number_rows

CPU = torch.device("cpu")


def groups(*lengths):
    """One episode a group: two prompt tokens, then a demonstration of each length."""
    made = []
    for index, n in enumerate(lengths):
        row = Row([Segment("prompt", [1, 2]), Segment("action", [5] * n)], objective=Objective.CROSS_ENTROPY)
        made.append(Group(str(index), Task("t"), [Episode("e", Task("t"), Outcome.finish(), rows=[row])]))
    return made


@pytest.fixture
def sft():
    return SFT(SFTConfig(name="sft"))


def test_loss_is_the_token_mean_over_the_step(sft):
    """Four tokens at probability 1/2 and one at 1/4: (4 log 2 + log 4) / 5, not the mean of two row means."""
    rows = sft.prepare(number_rows(groups(4, 1)))
    normalizers = sft.loss_normalizers(rows)
    assert normalizers == {Objective.CROSS_ENTROPY: 5.0}
    outputs = torch.tensor([[0, 0, *[np.log(0.5)] * 4], [0, 0, np.log(0.25), 0, 0, 0]]).float()
    loss, metrics = sft.loss("actor", Outputs(outputs), pad(rows, CPU), normalizers)
    assert loss.item() == pytest.approx(6 * np.log(2) / 5, rel=1e-6)
    assert metrics["loss"] == (pytest.approx(6 * np.log(2), rel=1e-6), 5.0)


def test_gradient_is_the_same_in_any_micro_batches(sft):
    rows = sft.prepare(number_rows(groups(3, 1, 4)))
    normalizers = sft.loss_normalizers(rows)

    def gradients(cut, length):
        found = []
        for start in range(0, len(rows), cut):
            batch = pad(rows[start : start + cut], CPU, length)
            outputs = torch.full(batch.token_ids.shape, -1.0, requires_grad=True)
            sft.loss("actor", Outputs(outputs), batch, normalizers)[0].backward()
            found += [line[:6].tolist() for line in outputs.grad]
        return found

    assert gradients(1, 6) == gradients(3, 11) == gradients(2, 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nothing_at_a_masked_place_reaches_loss_or_gradient(sft, bad):
    rows = sft.prepare(number_rows(groups(2, 1)))
    batch = pad(rows, CPU, 6)
    outputs = torch.where(batch.loss_weights > 0, -1.0, bad).requires_grad_()
    loss, _ = sft.loss("actor", Outputs(outputs), batch, sft.loss_normalizers(rows))
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert torch.equal(outputs.grad, torch.where(batch.loss_weights > 0, -1 / 3, 0.0))


def test_prompts_are_not_taught(sft):
    for row in sft.prepare(number_rows(groups(3))):
        assert row.loss_weights.tolist() == [0, 0, 1, 1, 1]


def test_episodes_are_units_of_their_own(sft):
    """So that a step can be cut into micro-batches and mini-batches between any two of them."""
    assert [(row.microbatch_key, row.episode_index) for row in sft.prepare(number_rows(groups(3, 1, 2)))] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]


def test_weights_of_tokens_count(sft):
    """A token of weight 1/2 counts half in the sum and half in what it is divided by."""
    [group] = groups(2)
    group.episodes[0].rows[0].segments[1].loss_weights = [0.5, 1.0]
    rows = sft.prepare(number_rows([group]))
    outputs = torch.tensor([[0.0, 0.0, -4.0, -1.0]])
    loss, _ = sft.loss("actor", Outputs(outputs), pad(rows, CPU), sft.loss_normalizers(rows))
    assert loss.item() == pytest.approx((0.5 * 4 + 1) / 1.5)


def test_evaluate_is_the_cross_entropy_of_a_token(sft):
    rows = sft.prepare(number_rows(groups(4, 1)))
    outputs = [np.array([0, -9, -1, -1, -1, -1], np.float32), np.array([0, -9, -2], np.float32)]
    assert sft.evaluate(rows, outputs) == {"eval/loss": pytest.approx(6 / 5)}


def test_needs_only_the_actor_and_takes_groups_of_one(sft):
    assert list(sft.roles) == ["actor"]
    assert sft.min_group_size == 1
