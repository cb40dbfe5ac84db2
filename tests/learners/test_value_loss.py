"""The critic's loss by hand and against the papers' formula, and which output is a state's value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from envgym.learners.losses import state_values, value_loss

NUMBERS = st.floats(-5, 5)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.32, -0.8, False),  # within 0.5 of the old value: (2 - 1.2)^2 / 2
        (1.8, 1.0, 2.0, 0.125, 0.0, True),  # moved too far towards the return: as if it stood at 1.5
        (0.2, 1.0, 2.0, 1.62, -1.8, False),  # moved away: the whole way back
        (2.8, 1.0, 2.0, 0.32, 0.8, False),  # beyond the return: the larger of 0.8^2 and 0.5^2
    ],
)
def test_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value]).double().requires_grad_()
    losses, held = value_loss(values, torch.tensor([old]).double(), torch.tensor([target]).double(), 0.5)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert held.item() is clipped


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0.01, 3))
def test_is_the_papers_formula(papers, value, old, target, clip):
    tensors = torch.tensor([[value], [old], [target]], dtype=torch.float64)
    assert value_loss(*tensors, clip)[0].item() == pytest.approx(papers.value_loss(value, old, target, clip))


def test_without_a_clip_it_is_half_the_squared_error():
    losses, clipped = value_loss(torch.tensor([9.0]), torch.tensor([0.0]), torch.tensor([1.0]), None)
    assert (losses.item(), clipped.item()) == (32.0, False)


def test_a_states_value_is_what_the_head_says_at_the_token_before():
    outputs = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert state_values(outputs).tolist() == [[0, 1, 2], [0, 4, 5]]
