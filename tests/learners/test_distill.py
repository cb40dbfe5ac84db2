"""Distillation: the divergence against the whole vocabulary in float64, and how the two losses are mixed."""

import numpy as np
import pytest
import torch

from envgym.learner import Outputs, pad
from envgym.learners.distill import Distill, DistillConfig, topk_forward_kl
from envgym.types import Episode, Group, Objective, Outcome, Row, Segment, Task, number_rows

CPU = torch.device("cpu")


def distributions(vocabulary=20, tokens=6):
    torch.manual_seed(0)
    return torch.randn(2, tokens, vocabulary, dtype=torch.float64).mul(2).log_softmax(-1)


def test_over_the_whole_vocabulary_the_divergence_is_exact():
    student, teacher = distributions()
    top, ids = teacher.topk(20, -1)
    exact = (teacher.exp() * (teacher - student)).sum(-1)
    torch.testing.assert_close(topk_forward_kl(student.gather(1, ids), top), exact, atol=1e-12, rtol=0)
    below = topk_forward_kl(student.gather(1, ids)[:, :5], top[:, :5])
    assert (below <= exact + 1e-12).all()  # what is lumped together can only hide a difference
    assert (below >= 0).all()


def test_what_is_beyond_the_likeliest_counts_as_one_token():
    student, teacher = distributions()
    top, ids = teacher.topk(3, -1)
    own = student.gather(1, ids)
    p, q = (torch.cat([part.exp(), 1 - part.exp().sum(-1, keepdim=True)], -1) for part in (top, own))
    torch.testing.assert_close(topk_forward_kl(own, top), (p * (p / q).log()).sum(-1), atol=1e-12, rtol=0)


def test_a_student_that_is_the_teacher_has_nothing_to_learn():
    _, teacher = distributions()
    top = teacher.topk(4, -1).values.requires_grad_()
    loss = topk_forward_kl(top, top.detach()).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    # A step along any direction that stays a distribution changes nothing: the gradient is the same for all tokens.
    assert torch.isfinite(top.grad).all()


def test_the_teacher_scores_at_the_temperature_of_the_student():
    row = Row([Segment("prompt", [1, 2]), Segment("action", [5, 6], temperature=0.7)])
    episode = Episode("e", Task("t"), Outcome.finish(), [row])
    learner = Distill(DistillConfig(name="distill", top_k=2))
    [scored] = learner.rows_to_score(number_rows([Group("g", Task("t"), [episode])]))
    assert scored.temperatures is None


@pytest.mark.parametrize("coef", [0.0, 0.4, 1.0])
def test_the_loss_mixes_answers_and_teacher(coef):
    learner = Distill(DistillConfig(name="distill", kd_coef=coef, top_k=2))
    row = Row([Segment("prompt", [1, 2]), Segment("action", [5, 6])], Objective.CROSS_ENTROPY)
    found = number_rows([Group("g", Task("t"), [Episode("e", Task("t"), Outcome.finish(), [row])])])
    likeliest = np.zeros((4, 2, 2), np.float32)
    likeliest[2:, :, 0] = np.log([[0.75, 0.25], [0.5, 0.5]])
    likeliest[2:, :, 1] = [[5, 7], [6, 8]]
    found[0].episodes[0].rows[0].arrays["teacher"] = likeliest
    rows = learner.prepare(found)
    batch = pad(rows, CPU)
    assert batch.arrays["teacher_ids"][0, 2:].tolist() == [[5, 7], [6, 8]]
    student = torch.full((1, 4, 2), float("nan"))
    student[0, 2:] = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    logprobs = torch.full((1, 4), float("nan"))
    logprobs[0, 2:] = torch.tensor([0.5, 0.25]).log()
    loss, metrics = learner.loss(
        "actor", Outputs(logprobs, extra_logprobs=student), batch, learner.loss_normalizers(rows)
    )
    nll = -(np.log(0.5) + np.log(0.25)) / 2
    kl = (0.75 * np.log(1.5) + 0.25 * np.log(0.5) + 0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2
    assert loss.item() == pytest.approx((1 - coef) * nll + coef * kl, rel=1e-5)
    assert metrics["distill/kl"][0] / metrics["distill/kl"][1] == pytest.approx(kl, rel=1e-5)
