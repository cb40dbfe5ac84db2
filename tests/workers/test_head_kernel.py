"""The head's Triton kernels, without a GPU: Triton's interpreter runs them on a CPU's tensors, and its compiler makes
an H100's machine code of them. Each needs a process of its own, since Triton reads its mode when it is imported."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import pytest
import torch

from envgym.learner import RoleSpec
from envgym.workers import head as head_module
from envgym.workers import trials
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.head import LogprobHead, Rescaling, score
from envgym.workers.model import ModelWorker
from envgym.workers.network import TokenNetwork
from tests.workers.test_network import make_model
from tests.workers.test_prefixes import CPU

pytest.importorskip("triton")

ROWS, WIDTH, VOCABULARY = 7, 6, 70


@dataclass(frozen=True)
class Case:
    rescaling: Rescaling = field(default_factory=Rescaling)
    dtype: torch.dtype = torch.float32
    n_targets: int = 1
    entropy: bool = True
    graph: bool = True
    sliced: bool = False
    biased: bool = False
    factor: float = 1.0
    """Of the logits."""


def run(case: Case, dtype: torch.dtype, *, fused: bool) -> list[torch.Tensor]:
    """Log-probabilities, entropies if asked for, and gradients of states, weight and bias, of drawn numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    leaves = [draw(ROWS, WIDTH) * case.factor, draw(VOCABULARY, WIDTH), *([draw(VOCABULARY)] if case.biased else [])]
    leaves = [leaf.to(case.dtype).to(dtype).requires_grad_() for leaf in leaves]
    targets = torch.randint(VOCABULARY, (ROWS, case.n_targets), generator=generator)
    targets[:, -1] = targets[:, 0]  # asked for twice, if there are several
    of_logprobs, of_entropies = draw(ROWS, case.n_targets).to(dtype), draw(ROWS).to(dtype)
    states, weight, bias = (*leaves, None)[:3]
    logprobs, *entropies = score(
        states, weight, bias, targets, torch.linspace(0.5, 2.0, ROWS), case.rescaling,
        entropy=case.entropy, graph=case.graph, fused=fused,
    )  # fmt: skip
    loss = (of_logprobs * logprobs).sum()
    if case.graph:
        loss = loss + (of_entropies * entropies[0]).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return [tensor.detach().double() for tensor in (logprobs, *entropies, *gradients)]


def errors(case: Case) -> list[list[float]]:
    """The largest errors of the kernels, and of the plain form in the same dtype, against the plain form in float64."""
    from envgym.workers import head_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_kernel, "BLOCK", 16)  # five blocks a row, or two a slice
        patch.setattr(head_module, "MULTIPLE", 8)
        patch.setattr(head_module, "MIN_SLICE", 24 if case.sliced else 1024)
        patch.setattr(head_module, "MAX_LOGITS", ROWS * 24)
        exact = run(case, torch.float64, fused=False)
        forms = [run(case, case.dtype, fused=fused) for fused in (True, False)]
    return [[float((a - b).abs().max()) for a, b in zip(form, exact, strict=True)] for form in forms]


@pytest.fixture(scope="module")
def interpreter():
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            processes.submit(os.getpid).result()  # the process starts here
        yield processes


CASES = {
    "plain": Case(),
    "in slices": Case(sliced=True),
    "with a bias": Case(biased=True, sliced=True),
    "of given tokens": Case(n_targets=3, entropy=False, graph=False),
    "of given tokens in slices": Case(n_targets=3, sliced=True),
    "entropies without a gradient": Case(graph=False),
    "scaled": Case(Rescaling(0.25)),
    "soft caps": Case(Rescaling(2.0, 1.5), n_targets=2, sliced=True),
    "far apart": Case(factor=30.0, sliced=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_give_the_numbers_and_gradients_of_the_plain_form(name, interpreter):
    kernel, plain = interpreter.submit(errors, CASES[name]).result()
    limit = 1e-6 if CASES[name].factor == 1 else 1e-4
    assert max(kernel) < max(limit, 2 * max(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_they_round_as_the_plain_form_does(dtype, interpreter):
    kernel, plain = interpreter.submit(errors, Case(Rescaling(2.0, 4.0), dtype, sliced=True)).result()
    assert all(error <= 1.5 * reference + 1e-6 for error, reference in zip(kernel, plain, strict=True))


def compile_all(target: tuple[str, int, int]) -> list[str]:
    """The kinds of code made of each kernel, for two number formats, without and with all that it can do."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from envgym.workers import head_kernel

    def kind(name, dtype):
        constant = {"logits_ptr": f"*{dtype}", "targets_ptr": "*i64", "scale": "fp32", "cap": "fp32"}
        return constant.get(name, "*fp32" if name.endswith("_ptr") else "constexpr" if name.isupper() else "i32")

    return [
        name
        for kernel in (head_kernel.sums_kernel, head_kernel.gradient_kernel)
        for dtype in ("bf16", "fp32")
        for full in (False, True)
        for name in compile_kernel(
            ASTSource(
                fn=kernel,
                signature={name: kind(name, dtype) for name in kernel.arg_names},
                constexprs={"CAPPED": full, "ENTROPY": full, "BLOCK": head_kernel.BLOCK},
            ),
            target=GPUTarget(*target),
            options={"num_warps": head_kernel.WARPS},
        ).asm
    ]


def test_they_compile_for_an_h100(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        kinds = processes.submit(compile_all, ("cuda", 90, 32)).result()
    assert kinds.count("cubin") == 8


def on_any_device(monkeypatch, form):
    """Let the trial take a CPU's head, whose fused form is `form`."""
    monkeypatch.setattr(trials, "can_fuse_head", lambda head, device: True)
    monkeypatch.setattr(head_module, "_kernels", lambda: form)


class Plain:
    """A fused form that is the plain one, times `factor`."""

    def __init__(self, factor=1.0):
        self._factor = factor

    def FusedSums(self, vocabulary, entropy):
        sums = head_module._Sums(vocabulary, entropy, stored=True)
        add = sums.add
        sums.add = lambda logits, part: add(logits.float() * self._factor, part)
        return sums

    def write_gradient(self, logits, vocabulary, part, total, entropies, grad_targets, grad_rows, grad_entropies):
        log_p = logits - total[:, None]
        factor = -grad_rows[:, None]
        if grad_entropies is not None:
            factor = factor - grad_entropies[:, None] * (log_p + entropies[:, None])
        gradient = log_p.exp() * factor
        vocabulary.add_at_targets(gradient, part, grad_targets)
        return gradient


def test_a_head_is_fused_only_where_its_kernels_answer_as_the_plain_form(monkeypatch):
    network = TokenNetwork(make_model("qwen3"), "lm", entropy=True)
    head = network.model.get_output_embeddings()
    assert isinstance(head, LogprobHead)
    assert trials.try_fused_head(network, CPU) == ""
    assert not head.fused  # a CPU keeps the plain form
    on_any_device(monkeypatch, Plain())
    assert trials.try_fused_head(network, CPU) == ""
    assert head.fused
    on_any_device(monkeypatch, Plain(1.1))
    assert trials.try_fused_head(network, CPU) == "the head is not fused, since its kernel answers otherwise"
    assert not head.fused
    on_any_device(monkeypatch, None)
    reason = trials.try_fused_head(network, CPU)
    assert reason.startswith("the head is not fused, since its kernel fails (AttributeError: ")
    assert not head.fused


@pytest.mark.parametrize("kernels", ["auto", "none"])
def test_a_worker_tries_it_unless_it_is_told_not_to(kernels, monkeypatch, tied_model, learner):
    on_any_device(monkeypatch, Plain(1.1))
    settings = WorkersConfig(kernels=kernels, dtype="float32")
    worker = ModelWorker(WorkerSpec("actor", tied_model, RoleSpec(trained=True), learner, settings))
    notes = worker.load().notes
    worker.close()
    expected = ["the head is not fused, since its kernel answers otherwise"] if kernels == "auto" else []
    assert list(notes) == expected
