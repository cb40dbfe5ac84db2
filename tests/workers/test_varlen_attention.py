"""Attention by torch's kernel for rows of different lengths: what takes it, and that it learns what plain rows do.

The kernel runs on GPUs alone. Here a plain softmax stands in for it, with torch's own signature.
"""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
import transformers
from torch.nn.attention.varlen import varlen_attn as torchs_kernel

from envgym.errors import ConfigError
from envgym.learner import RoleSpec
from envgym.types import Objective
from envgym.workers import attention
from envgym.workers import network as networks
from envgym.workers.attention import VARLEN, not_covered
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.micro_batches import micro_batches
from envgym.workers.model import ModelWorker
from envgym.workers.network import TokenNetwork, flash_attention, load_model
from envgym.workers.trials import obstacle_to_sharing, try_kernel
from tests.workers.conftest import PLAIN_GRADIENT_DESCENT
from tests.workers.test_network import answers, batch, make_model
from tests.workers.test_prefixes import CPU, assert_same, group_of_rows, results, sample


class Kernel:
    """A stand-in for `varlen_attn`: bottom-right causal softmax row by row. `calls` counts, `shift` makes it wrong."""

    def __init__(self):
        self.calls, self.shift = 0, 0

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
                 enable_gqa=False):  # fmt: skip
        assert query.ndim == key.ndim == value.ndim == 3
        assert query.is_contiguous()
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q[-1] == len(query)
        assert cu_seq_k[-1] == len(key) == len(value)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert window_size[1] == 0
        self.calls += 1
        repeats, outputs = query.shape[1] // key.shape[1], []
        for (q_start, q_stop), (start, stop) in zip(pairwise(cu_seq_q), pairwise(cu_seq_k), strict=True):
            assert q_stop - q_start <= max_q
            assert stop - start <= max_k
            q = query[q_start:q_stop].transpose(0, 1)
            k, v = (t[start:stop].repeat_interleave(repeats, 1).transpose(0, 1) for t in (key, value))
            steps = torch.arange(stop - start)
            ago = steps[len(steps) - q.shape[1] :, None] - steps - self.shift
            hidden = (ago < 0) | ((ago > window_size[0]) if window_size[0] >= 0 else False)
            scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(hidden, -torch.inf)
            outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs)


@pytest.fixture
def kernel(monkeypatch):
    stand_in = Kernel()
    parameters = set(inspect.signature(torchs_kernel).parameters)
    assert set(inspect.signature(stand_in).parameters) <= parameters
    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    monkeypatch.setattr(networks, "runs_here", lambda dtype: True)
    return stand_in


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "qwen3_moe"])
def test_packed_and_padded_rows_are_answered_as_by_sdpa(architecture, head, kernel):
    expected = answers(TokenNetwork(make_model(architecture, head), head, entropy=head == "lm"), batch(), packed=False)
    for packed in (False, True):
        network = TokenNetwork(make_model(architecture, head, attention=VARLEN), head, entropy=head == "lm")
        # Gradients in float32, whose last digits differ from one kind of CPU to another.
        torch.testing.assert_close(answers(network, batch(), packed), expected, atol=1e-5, rtol=1e-4)
    assert kernel.calls == 2 * network.model.config.num_hidden_layers


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3_text"])  # one without, two with windows of 4
def test_shared_prefixes_are_answered_as_by_sdpa(architecture, kernel):
    options = {"gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}}
    options = options.get(architecture, {})
    rows = [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7, 8], [9, 8], [1, 2], [1, 2, 3, 5, 6, 7, 9, 9, 4]]
    samples = [sample(row, index) for index, row in enumerate(rows)]
    expected = results(TokenNetwork(make_model(architecture, **options), "lm", entropy=True), samples, "padded")
    network = TokenNetwork(make_model(architecture, attention=VARLEN, **options), "lm", entropy=True)
    assert obstacle_to_sharing(network, network, CPU, trained=True) == ""
    kernel.calls = 0
    torch.testing.assert_close(results(network, samples, "shared"), expected, atol=1e-5, rtol=1e-5)
    assert kernel.calls == network.model.config.num_hidden_layers


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_makes_one_call_a_layer_and_micro_batch(shared, kernel, tied_model, learner):
    rows = group_of_rows()
    settings = WorkersConfig(tokens_per_microbatch=60, dtype="float32", share_prefixes=shared)
    worker = ModelWorker(WorkerSpec("actor", tied_model, RoleSpec(trained=True), learner, settings))
    info = worker.load()
    try:
        assert (info.attention, info.packed, info.notes) == (VARLEN, True, ())
        layout = info.layout_of(rows)
        assert layout == ("shared" if shared else "packed")
        [batches] = micro_batches(rows, 60, 1, layout=layout)
        assert len(batches) > 1
        normalizers = {o: float(sum(r.loss_weights.sum() for r in rows if r.objective == o)) for o in Objective}
        for _ in range(2):
            kernel.calls = 0
            worker.accumulate(batches, normalizers, layout)
            worker.step(1e-3)
            assert kernel.calls == len(batches) * worker.network.model.config.num_hidden_layers
    finally:
        worker.close()


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"role": "critic"}])
def test_a_worker_learns_the_same_by_the_kernel(options, kernel, tmp_path, tied_model, learner):
    plain = {"attention": "sdpa", "deepspeed": PLAIN_GRADIENT_DESCENT}
    assert_same(tmp_path, tied_model, group_of_rows(), learner, **options | plain, shared={"attention": "auto"})
    assert kernel.calls


def test_a_kernel_that_answers_otherwise_or_fails_is_not_used(kernel, tied_model):
    def tried():
        network = TokenNetwork(load_model(tied_model, "lm", torch.float32), "lm")
        assert network.model.config._attn_implementation == VARLEN
        return try_kernel(network, network, CPU), network.model.config._attn_implementation

    assert tried() == ("", VARLEN)
    kernel.shift = -1  # a query sees one key after itself
    assert tried() == ("attention is sdpa, since torch's varlen_attn answers otherwise", "sdpa")
    kernel.shift = None
    reason, kind = tried()
    assert kind == "sdpa"
    assert reason.startswith("attention is sdpa, since torch's varlen_attn fails (TypeError: ")


COVERED = [
    (transformers.LlamaConfig(), ""),
    (transformers.Qwen2Config(), ""),
    (transformers.Qwen3Config(), ""),
    (transformers.MistralConfig(sliding_window=4096), ""),
    (transformers.Gemma3TextConfig(), ""),
    (transformers.Gemma2Config(), "a soft cap of attention"),
    (transformers.GptOssConfig(), "sinks, or another softmax"),
    (transformers.DeepseekV3Config(), "heads of different widths"),
    (transformers.LlamaConfig(hidden_size=320, num_attention_heads=16), "a head width that is no multiple of 8"),
    (transformers.LlamaConfig(hidden_size=1024, num_attention_heads=2), "a head width that is no multiple of 8"),
    (transformers.Qwen3NextConfig(), "layers other than full and sliding attention"),
    (transformers.BloomConfig(), "attention of its own"),
    (transformers.MambaConfig(), "layers other than full and sliding attention"),
    (transformers.LlamaConfig(attention_dropout=0.1), "dropout of attention"),
]


@pytest.mark.parametrize(("config", "feature"), COVERED, ids=lambda value: getattr(value, "model_type", ""))
def test_what_the_kernel_has_not_keeps_its_attention(config, feature, monkeypatch):
    monkeypatch.setattr(networks, "runs_here", lambda dtype: True)
    factory = transformers.AutoModelForCausalLM
    reason = not_covered(config, factory._model_mapping[type(config)])
    assert reason.startswith(feature)
    assert bool(reason) == bool(feature)
    assert flash_attention(config, factory, torch.bfloat16) == (None if feature else VARLEN)


def test_an_older_torch_has_no_windows(monkeypatch):
    llama = transformers.LlamaConfig(), transformers.LlamaForCausalLM
    mistral = transformers.MistralConfig(sliding_window=4096), transformers.MistralForCausalLM
    seen = {}

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        seen["heads"], seen["causal"] = (query.shape[1], key.shape[1]), is_causal
        return Kernel()(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))

    monkeypatch.setattr(attention, "varlen_attn", older)
    assert not_covered(*llama) == ""
    assert not_covered(*mistral) == "windows, which this torch's varlen_attn does not take"
    expected = answers(TokenNetwork(make_model("qwen3"), "lm"), batch(), packed=False)
    network = TokenNetwork(make_model("qwen3", attention=VARLEN), "lm")
    torch.testing.assert_close(answers(network, batch(), packed=True), expected, atol=1e-5, rtol=1e-5)
    assert seen["causal"]
    assert seen["heads"][0] == seen["heads"][1]


def test_the_kernel_is_for_16_bits_on_a_gpu_from_ampere_on(monkeypatch):
    assert not attention.runs_here(torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert attention.runs_here(torch.bfloat16)
    assert not attention.runs_here(torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert not attention.runs_here(torch.float16)


def test_named_for_a_model_that_it_does_not_cover_it_is_refused(tmp_path):
    make_model("gemma2", attn_logit_softcapping=2.0).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"torch_varlen does not support gemma2: a soft cap of attention$"):
        load_model(str(tmp_path), "lm", torch.float32, attention=VARLEN)


def test_where_sdpa_stays_cudnn_is_off(tied_model):
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_model(tied_model, "lm", torch.float32)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
