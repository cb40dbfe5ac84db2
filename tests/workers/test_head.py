"""Log-probabilities and entropies from hidden states, against the plain way in float64: all logits at once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from envgym.workers import head as head_module
from envgym.workers.head import LogprobHead, Rescaling

VOCABULARY, WIDTH, TOKENS = 50, 6, 7
RESCALINGS = [Rescaling(), Rescaling(scale=0.25), Rescaling(scale=2.0, cap=1.5)]


def numbers(states, head, targets, temperatures, rescaling):
    """[N] log-probabilities and entropies, from logits that all exist at once."""
    logits = rescaling.scale * nn.functional.linear(states, head.weight, head.bias)
    if rescaling.cap is not None:
        logits = rescaling.cap * torch.tanh(logits / rescaling.cap)
    logs = torch.log_softmax(logits / temperatures[:, None], 1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(1)


@pytest.fixture(params=["in one piece", "in slices"])
def pieces(request, monkeypatch):
    if request.param == "in slices":
        set_slices(monkeypatch, 8)


def set_slices(monkeypatch, width):
    monkeypatch.setattr(head_module, "MAX_LOGITS", TOKENS * width)
    monkeypatch.setattr(head_module, "MIN_SLICE", 1)
    monkeypatch.setattr(head_module, "MULTIPLE", 1)


def make(bias, dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    states = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 49, 7, 8, 15, 16, 31])  # also at the edges of slices
    return head, states, targets, torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_numbers_and_gradients_are_those_of_all_logits_at_once(rescaling, bias, graph):
    head, states, targets, temperatures = make(bias)
    of_logprobs, of_entropies = torch.randn(2, TOKENS, dtype=torch.float64)
    parameters = [states, *head.parameters()]

    expected = numbers(states, head, targets, temperatures, rescaling)
    loss = (of_logprobs * expected[0]).sum() + (of_entropies * expected[1]).sum() * graph
    expected_grads = torch.autograd.grad(loss, parameters)

    scored = LogprobHead.convert(head, rescaling)(states, targets, temperatures, True, graph)
    assert scored[1].requires_grad == graph
    loss = (of_logprobs * scored[0]).sum() + ((of_entropies * scored[1]).sum() if graph else 0.0)
    torch.testing.assert_close(scored, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), expected_grads, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_a_pass_without_entropies_gives_the_same_log_probabilities():
    head, states, targets, temperatures = make(bias=False)
    scoring = LogprobHead.convert(head, Rescaling())
    with_entropies = scoring(states, targets, temperatures, True, False)
    [logprobs_only] = scoring(states, targets, temperatures, False, False)
    with torch.no_grad():
        [quiet] = scoring(states, targets, temperatures, False, False)
    assert torch.equal(logprobs_only, with_entropies[0])
    assert torch.equal(quiet, with_entropies[0])
    assert logprobs_only.requires_grad
    assert not quiet.requires_grad


@pytest.mark.usefixtures("pieces")
def test_only_gradients_that_are_asked_for_are_made():
    head, states, targets, temperatures = make(bias=True)
    head.requires_grad_(False)
    [logprobs] = LogprobHead.convert(head, Rescaling())(states, targets, temperatures, False, False)
    logprobs.sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    expected, _ = numbers(states, head, targets, temperatures, Rescaling())
    torch.testing.assert_close(states.grad, torch.autograd.grad(expected.sum(), states)[0], atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_a_graph_that_is_kept_gives_its_gradient_twice():
    head, states, targets, temperatures = make(bias=False)
    [logprobs] = LogprobHead.convert(head, Rescaling())(states, targets, temperatures, False, False)
    first = torch.autograd.grad(logprobs.sum(), states, retain_graph=True)
    repeated = torch.autograd.grad(logprobs.sum(), states)
    torch.testing.assert_close(repeated, first, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("pieces")
def test_no_tokens_have_no_numbers_and_no_gradient():
    head, states, targets, temperatures = make(bias=False)
    no_rows = slice(0, 0)
    logprobs, entropies = LogprobHead.convert(head, Rescaling())(
        states[no_rows], targets[no_rows], temperatures[no_rows], True, True
    )
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert not head.weight.grad.any()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_count_in_float32(dtype):
    head, states, targets, temperatures = make(bias=False, dtype=dtype)
    temperatures = temperatures.float()
    logits = nn.functional.linear(states, head.weight).float() / temperatures[:, None]
    logs = torch.log_softmax(logits, 1)
    expected = logs.gather(1, targets[:, None])[:, 0]
    expected_grads = torch.autograd.grad(expected.sum(), [states, head.weight])
    logprobs, entropies = LogprobHead.convert(head, Rescaling())(states, targets, temperatures, True, True)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropies, -(logs.exp() * logs).sum(1), atol=2e-6, rtol=0)
    gradients = torch.autograd.grad(logprobs.sum(), [states, head.weight])
    torch.testing.assert_close(gradients, expected_grads, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("pieces")
def test_extreme_logits_stay_finite():
    head, states, targets, temperatures = make(bias=False)
    states = (states.detach() * 1e4).requires_grad_()
    logprobs, entropies = LogprobHead.convert(head, Rescaling())(states, targets, temperatures, True, True)
    expected, _ = numbers(states, head, targets, temperatures, Rescaling())
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=0)
    assert entropies.abs().max() < 1e-6
    [gradient] = torch.autograd.grad(logprobs.sum() + entropies.sum(), states)
    assert gradient.isfinite().all()


def test_never_are_there_more_logits_than_the_limit(monkeypatch):
    set_slices(monkeypatch, 8)
    head, states, targets, temperatures = make(bias=False)
    max_size = 0
    original = nn.functional.linear

    def watched(*args):
        nonlocal max_size
        result = original(*args)
        max_size = max(max_size, result.numel())
        return result

    monkeypatch.setattr(nn.functional, "linear", watched)
    logprobs, _ = LogprobHead.convert(head, Rescaling())(states, targets, temperatures, True, True)
    logprobs.sum().backward()
    assert max_size == TOKENS * 8


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
def test_several_tokens_in_one_place_and_their_gradient(rescaling):
    """Also where one is asked for twice."""
    head, states, targets, temperatures = make(bias=True)
    candidates = torch.stack([targets, (targets + 9) % VOCABULARY, targets, (targets * 7) % VOCABULARY], 1)
    weights = torch.randn(candidates.shape, dtype=torch.float64)
    parameters = [states, *head.parameters()]
    expected = torch.stack([numbers(states, head, column, temperatures, rescaling)[0] for column in candidates.T], 1)
    expected_grads = torch.autograd.grad((weights * expected).sum(), parameters)
    [scored] = LogprobHead.convert(head, rescaling)(states, candidates, temperatures, False, False)
    torch.testing.assert_close(scored, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        torch.autograd.grad((weights * scored).sum(), parameters), expected_grads, atol=1e-12, rtol=0
    )


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rescaling", RESCALINGS)
@pytest.mark.parametrize("k", [1, 5, VOCABULARY])
def test_the_likeliest_tokens_are_those_of_all_logits(rescaling, k):
    head, states, _, temperatures = make(bias=True)
    all_tokens = torch.arange(VOCABULARY).expand(TOKENS, -1)
    logs = torch.stack([numbers(states, head, column, temperatures, rescaling)[0] for column in all_tokens.T], 1)
    expected = logs.topk(k, 1)
    top_logprobs, ids = LogprobHead.convert(head, rescaling)(states, None, temperatures, False, False, k)
    torch.testing.assert_close(top_logprobs, expected.values, atol=1e-12, rtol=0)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("gigabytes", [24, 80, 141])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [16_352, 9_001, 513])
def test_slices_on_a_gpu_are_of_its_size_and_begin_at_even_places(gigabytes, fused, rows, monkeypatch):
    """16,352 rows and 2^25 logits gave 2,052 columns, for which cuBLAS has no fast kernel."""
    device = torch.device("cuda")
    memory = SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: memory if of == device else None)
    weight = type("Weight", (), {"device": device, "element_size": lambda _: 2, "__len__": lambda _: 151_936})()
    temperatures = torch.ones(rows)
    slices = head_module._Vocabulary(
        None, weight, None, torch.zeros(rows, 1), temperatures, Rescaling(), False, fused
    ).slices
    assert slices[-1].stop == 151_936
    assert all(part.start % 256 == 0 for part in slices)
    columns, most = slices[0].stop, memory.total_memory / 128 / rows / (2 if fused else 10)
    assert most - 256 < columns <= most or columns == 151_936
