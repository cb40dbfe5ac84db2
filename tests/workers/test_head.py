"""Log-probabilities and entropies from hidden states, against the plain way in float64: all logits at once."""

import pytest
import torch
from torch import nn

from envgym.workers import head as head_module
from envgym.workers.head import Rescaling, ScoringHead

VOCABULARY, WIDTH, TOKENS = 50, 6, 7
RESCALINGS = [Rescaling(), Rescaling(scale=0.25), Rescaling(scale=2.0, cap=1.5)]


def numbers(hidden, head, targets, temperatures, rescaling):
    """[N] log-probabilities and entropies, from logits that all exist at once."""
    logits = rescaling.scale * nn.functional.linear(hidden, head.weight, head.bias)
    if rescaling.cap is not None:
        logits = rescaling.cap * torch.tanh(logits / rescaling.cap)
    logs = torch.log_softmax(logits / temperatures[:, None], 1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(1)


@pytest.fixture(params=["in one piece", "in slices"])
def pieces(request, monkeypatch):
    if request.param == "in slices":
        monkeypatch.setattr(head_module, "LOGITS_AT_ONCE", TOKENS * 8)
        monkeypatch.setattr(head_module, "NARROWEST", 1)


def make(bias, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 49, 7, 8, 15, 16, 31])  # also at the edges of slices
    return head, hidden, targets, torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_numbers_and_gradients_are_those_of_all_logits_at_once(rescaling, bias, graph):
    head, hidden, targets, temperatures = make(bias)
    of_logprobs, of_entropies = torch.randn(2, TOKENS, dtype=torch.float64)
    parameters = [hidden, *head.parameters()]

    expected = numbers(hidden, head, targets, temperatures, rescaling)
    loss = (of_logprobs * expected[0]).sum() + (of_entropies * expected[1]).sum() * graph
    wanted = torch.autograd.grad(loss, parameters)

    scored = ScoringHead.of(head, rescaling)(hidden, targets, temperatures, True, graph)
    assert scored[1].requires_grad == graph
    loss = (of_logprobs * scored[0]).sum() + ((of_entropies * scored[1]).sum() if graph else 0.0)
    torch.testing.assert_close(scored, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_a_pass_without_entropies_gives_the_same_log_probabilities():
    head, hidden, targets, temperatures = make(bias=False)
    scoring = ScoringHead.of(head, Rescaling())
    both = scoring(hidden, targets, temperatures, True, False)
    [alone] = scoring(hidden, targets, temperatures, False, False)
    with torch.no_grad():
        [quiet] = scoring(hidden, targets, temperatures, False, False)
    assert torch.equal(alone, both[0])
    assert torch.equal(quiet, both[0])
    assert alone.requires_grad
    assert not quiet.requires_grad


@pytest.mark.usefixtures("pieces")
def test_only_gradients_that_are_asked_for_are_made():
    head, hidden, targets, temperatures = make(bias=True)
    head.requires_grad_(False)
    [logprobs] = ScoringHead.of(head, Rescaling())(hidden, targets, temperatures, False, False)
    logprobs.sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    expected, _ = numbers(hidden, head, targets, temperatures, Rescaling())
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected.sum(), hidden)[0], atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_a_graph_that_is_kept_gives_its_gradient_twice():
    head, hidden, targets, temperatures = make(bias=False)
    [logprobs] = ScoringHead.of(head, Rescaling())(hidden, targets, temperatures, False, False)
    first = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    again = torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(again, first, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_no_tokens_have_no_numbers_and_no_gradient():
    head, hidden, targets, temperatures = make(bias=False)
    none = slice(0, 0)
    logprobs, entropies = ScoringHead.of(head, Rescaling())(hidden[none], targets[none], temperatures[none], True, True)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert not head.weight.grad.any()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_count_in_float32(dtype):
    head, hidden, targets, temperatures = make(bias=False, dtype=dtype)
    temperatures = temperatures.float()
    logits = nn.functional.linear(hidden, head.weight).float() / temperatures[:, None]
    logs = torch.log_softmax(logits, 1)
    expected = logs.gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    logprobs, entropies = ScoringHead.of(head, Rescaling())(hidden, targets, temperatures, True, True)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(1), atol=2e-6, rtol=0)
    gradients = torch.autograd.grad(logprobs.sum(), [hidden, head.weight])
    torch.testing.assert_close(gradients, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("pieces")
def test_extreme_logits_stay_finite():
    head, hidden, targets, temperatures = make(bias=False)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    logprobs, entropies = ScoringHead.of(head, Rescaling())(hidden, targets, temperatures, True, True)
    expected, _ = numbers(hidden, head, targets, temperatures, Rescaling())
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=0)
    assert entropies.abs().max() < 1e-6
    [gradient] = torch.autograd.grad(logprobs.sum() + entropies.sum(), hidden)
    assert gradient.isfinite().all()


def test_never_are_there_more_logits_than_the_limit(monkeypatch):
    monkeypatch.setattr(head_module, "LOGITS_AT_ONCE", TOKENS * 8)
    monkeypatch.setattr(head_module, "NARROWEST", 1)
    head, hidden, targets, temperatures = make(bias=False)
    largest = 0
    original = nn.functional.linear

    def watched(*args):
        nonlocal largest
        out = original(*args)
        largest = max(largest, out.numel())
        return out

    monkeypatch.setattr(nn.functional, "linear", watched)
    logprobs, _ = ScoringHead.of(head, Rescaling())(hidden, targets, temperatures, True, True)
    logprobs.sum().backward()
    assert largest == TOKENS * 8


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_several_tokens_in_one_place_and_their_gradient(rescaling):
    """Also where one is asked for twice."""
    head, hidden, targets, temperatures = make(bias=True)
    several = torch.stack([targets, (targets + 9) % VOCABULARY, targets, (targets * 7) % VOCABULARY], 1)
    weights = torch.randn(several.shape, dtype=torch.float64)
    parameters = [hidden, *head.parameters()]
    expected = torch.stack([numbers(hidden, head, own, temperatures, rescaling)[0] for own in several.T], 1)
    wanted = torch.autograd.grad((weights * expected).sum(), parameters)
    [scored] = ScoringHead.of(head, rescaling)(hidden, several, temperatures, False, False)
    torch.testing.assert_close(scored, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad((weights * scored).sum(), parameters), wanted, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_all_logits(rescaling, k):
    head, hidden, _, temperatures = make(bias=True)
    everything = torch.arange(VOCABULARY).expand(TOKENS, -1)
    logs = torch.stack([numbers(hidden, head, own, temperatures, rescaling)[0] for own in everything.T], 1)
    expected = logs.topk(k, 1)
    found, ids = ScoringHead.of(head, rescaling)(hidden, None, temperatures, False, False, k)
    torch.testing.assert_close(found, expected.values, atol=1e-12, rtol=0)
    assert torch.equal(ids, expected.indices)
