"""The network of a worker: rows packed and padded, tokens that are asked about, mixtures of experts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from envgym.errors import ConfigError
from envgym.processes.gpus import check_visible_gpu
from envgym.workers import head as head_module
from envgym.workers.micro_batches import padding_samples
from envgym.workers.network import TokenNetwork, check_experts, flash_attention
from envgym.workers.packing import packs
from tests.weight_files import export

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LENGTHS = (12, 3, 9, 1, 7)
BY_HAND = "attention_by_hand"


def config_of(architecture, **overrides):
    from transformers import AutoConfig

    shape = {**SHAPE, **overrides}
    if architecture == "mistral":
        shape["sliding_window"] = 4
    if architecture == "gemma2":
        shape |= {"sliding_window": 4, "query_pre_attn_scalar": 8}
    if architecture.endswith("_moe") or architecture == "mixtral":
        shape |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4}
    if architecture in ("qwen3_next", "jamba"):
        shape |= {"num_hidden_layers": 4, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    return AutoConfig.for_model(architecture, **shape)


def make_model(architecture, head="lm", attention="sdpa", **overrides):
    torch.manual_seed(0)
    config = config_of(architecture, **overrides)
    if head == "lm":
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    config.num_labels, config.classifier_dropout = 1, 0.0
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)


def attend_by_hand(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **told):
    """A kernel for rows of different lengths, as flash kernels are: no mask, but where rows end."""
    assert mask is None
    assert cu_seq_lens_q.dtype == torch.int32
    assert torch.equal(told["cu_seq_lens_k"], cu_seq_lens_q)
    assert told["max_length_k"] == max_length_q
    result = []
    repeats = query.shape[1] // key.shape[1]
    for start, stop in pairwise(cu_seq_lens_q):
        assert stop - start <= max_length_q
        q, k, v = (states[:, :, start:stop] for states in (query, key, value))
        scores = q @ k.repeat_interleave(repeats, 1).transpose(2, 3) * scaling
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        result.append(scores.softmax(-1) @ v.repeat_interleave(repeats, 1))
    return torch.cat(result, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_HAND, attend_by_hand)


def batch(seed=0):
    """token_ids, lengths, wanted and temperatures of five rows; padding holds tokens too, which nothing may see."""
    torch.manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    lengths = torch.tensor(LENGTHS)
    valid = torch.arange(shape[1]) < lengths[:, None]
    return torch.randint(VOCABULARY, shape), lengths, (torch.rand(shape) < 0.7) & valid, 0.5 + torch.rand(shape)


def answers(scorer, inputs, packed):
    """What is said in training mode, for real tokens, and the gradient of a weighted sum of it."""
    scorer.packed = packed
    scorer.train().zero_grad()
    outputs = scorer(*inputs)
    token_ids, lengths, *_ = inputs
    valid = torch.arange(token_ids.shape[1]) < lengths[:, None]
    torch.manual_seed(1)
    loss = sum(
        (torch.randn(numbers.shape) * numbers)[valid].sum() for name, numbers in outputs.items() if numbers.ndim == 2
    )
    (loss + outputs.get("balance", 0.0)).backward()
    gradients = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    return {n: v[valid] if v.ndim == 2 else v for n, v in outputs.items()}, gradients


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mistral", "gemma2", "qwen3_moe"])
def test_packed_rows_are_answered_as_padded_ones(architecture, head):
    model = make_model(architecture, head).double()
    if architecture == "qwen3_moe":
        model.set_experts_implementation("eager")  # the other has no float64
    assert packs(True, model)
    scorer = TokenNetwork(model, head, entropy=True, balance=architecture.endswith("moe"))
    padded, packed = (answers(scorer, batch(), packed) for packed in (False, True))
    assert padded[0].keys() == packed[0].keys() >= ({"logprobs", "entropy"} if head == "lm" else {"values"})
    torch.testing.assert_close(packed, padded, atol=1e-6, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_kernels_that_take_no_mask_are_told_where_rows_end(architecture, checkpointing):
    padded = answers(TokenNetwork(make_model(architecture), "lm", entropy=True), batch(), packed=False)
    model = make_model(architecture, attention=BY_HAND)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed = answers(TokenNetwork(model, "lm", entropy=True), batch(), packed=True)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_by_itself_only_a_kernel_that_takes_the_ends_of_rows_packs():
    model = make_model("qwen3")
    assert packs(True, model)
    assert not packs("auto", model)
    assert not packs(False, model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert packs("auto", model)
    assert not packs(False, model)


@pytest.mark.parametrize("architecture", ["qwen3_next", "jamba"])
def test_a_model_with_state_cannot_pack(architecture):
    model = make_model(architecture)
    assert not packs("auto", model)
    with pytest.raises(ConfigError, match=rf"packing=true does not work with {architecture}: .* next$"):
        packs(True, model)


@pytest.mark.parametrize("packed", [False, True])
def test_only_tokens_asked_about_reach_the_head_and_scoring_makes_no_entropies(packed, monkeypatch):
    scorer = TokenNetwork(make_model("qwen3"), "lm")
    scorer.packed = packed
    token_ids, lengths, mask, temperatures = batch()
    calls = []
    scorer.model.lm_head.register_forward_pre_hook(lambda module, args: calls.append((len(args[0]), args[3])))
    with torch.no_grad():
        outputs = scorer.eval()(token_ids, lengths, mask, temperatures)
    assert outputs.keys() == {"logprobs"}
    assert calls == [(int(mask[:, 1:].sum()), False)]
    assert not outputs["logprobs"][~mask].any()
    assert (outputs["logprobs"][:, 1:] < 0).equal(mask[:, 1:])
    logits = scorer.model.model(token_ids).last_hidden_state @ scorer.model.lm_head.weight.T
    logs = (logits[:, :-1] / temperatures[:, 1:, None]).log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(outputs["logprobs"][:, 1:], torch.where(mask[:, 1:], logs, 0.0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "granite", "cohere"])
def test_log_probabilities_are_those_of_the_models_own_logits(architecture, monkeypatch):
    monkeypatch.setattr(head_module, "MAX_LOGITS", 1000)
    monkeypatch.setattr(head_module, "MIN_SLICE", 1)
    monkeypatch.setattr(head_module, "MULTIPLE", 1)
    overrides = {
        "gemma2": {"final_logit_softcapping": 2.0},
        "granite": {"logits_scaling": 3.0},
        "cohere": {"logit_scale": 0.5},
    }
    model = make_model(architecture, **overrides.get(architecture, {}))
    token_ids, lengths, _, _ = batch()
    with torch.no_grad():
        logs = (
            model.eval()(input_ids=token_ids).logits[:, :-1].log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
        )
        scorer = TokenNetwork(model, "lm").eval()
        valid = torch.arange(token_ids.shape[1]) < lengths[:, None]
        actual = scorer(token_ids, lengths, valid, torch.ones(token_ids.shape))["logprobs"]
    torch.testing.assert_close(actual[:, 1:], torch.where(valid[:, 1:], logs, 0.0), atol=1e-5, rtol=1e-5)


# -- in a worker ------------------------------------------------------------------------------------------


@pytest.fixture
def make_worker(make_worker, tmp_path):
    def make(model, moe_aux_coef=0.0, **settings):
        model.save_pretrained(folder := tmp_path / f"model-{len(list(tmp_path.iterdir()))}")
        return make_worker(str(folder), learn={"moe_aux_coef": moe_aux_coef}, **settings)

    return make


def take_step(worker, microbatches, normalizers, tmp_path):
    metrics = worker.accumulate(microbatches, normalizers)
    norm = worker.step(1.0)["grad_norm"]
    export(worker, tmp_path / "weights")
    return metrics, norm, load_file(tmp_path / "weights")


def test_a_worker_learns_the_same_packed_and_padded(
    make_worker, make_rows, normalizers, plain_gradient_descent, tmp_path
):
    rows = make_rows(7)
    results = []
    for packing in (False, True):
        worker = make_worker(make_model("qwen3"), deepspeed=plain_gradient_descent, packing=packing)
        assert worker.info().packed == packing
        assert worker.info().attention == "sdpa"
        scores = worker.forward(rows)
        metrics, norm, weights = take_step(
            worker, [rows[:3], padding_samples(rows[:2]), rows[3:]], normalizers(rows), tmp_path
        )
        results.append((scores, metrics["loss"], norm, weights))
    torch.testing.assert_close(
        *[[torch.tensor(values) for values in scores] for scores, *_ in results], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(*[result[1:] for result in results], atol=2e-6, rtol=1e-5)


def test_a_critic_says_the_same_packed_and_padded(make_worker, make_rows):
    rows = make_rows(5)
    model = make_model("llama", "scalar")
    padded, packed = (
        make_worker(model, role="critic", head="scalar", packing=packing).forward(rows) for packing in (False, True)
    )
    for actual, expected in zip(packed, padded, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_model_in_which_rows_see_each_other_is_found_out(make_worker):
    opt = {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**opt, vocab_size=VOCABULARY, max_position_embeddings=64, init_std=0.2))
    assert packs(True, model), "nothing but trying shows that its positions are not those it is given"
    with pytest.raises(ConfigError, match="packing=true does not work with opt and sdpa: rows see each other"):
        make_worker(model, packing=True)
    assert not make_worker(model).info().packed


def test_flops_of_a_worker_are_a_pair_and_the_peak_of_a_cpu_is_unknown(make_worker):
    info = make_worker(make_model("qwen3", tie_word_embeddings=True)).info()
    a, b = info.flops_per_token
    assert a == 6 * info.n_parameters
    assert b == 12 * SHAPE["num_hidden_layers"] * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    assert info.peak_flops is None


# -- mixtures of experts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_the_balance_of_experts_moves_weights_as_transformers_own_loss_says(
    make_worker, make_rows, normalizers, plain_gradient_descent, tmp_path, architecture, packing
):
    rows = make_rows(6)
    cut = [rows[:2], padding_samples(rows[:1]), rows[2:]]
    weights = {}
    for coefficient in (0.0, 0.5):
        model = make_model(architecture)
        worker = make_worker(model, deepspeed=plain_gradient_descent, moe_aux_coef=coefficient, packing=packing)
        metrics, _, weights[coefficient] = take_step(worker, cut, normalizers(rows), tmp_path)

    losses, expected = by_hand(make_model(architecture), cut)
    assert metrics["moe/aux_loss"] == pytest.approx((losses, 1.0), rel=1e-5)
    max_gradient = 0.0
    for name, gradient in expected.items():
        torch.testing.assert_close(weights[0.0][name] - weights[0.5][name], 0.5 * gradient, atol=2e-6, rtol=1e-4)
        max_gradient = max(max_gradient, float(gradient.abs().max()) if "gate" in name or "router" in name else 0.0)
    assert max_gradient > 1e-3, "routers move"


def by_hand(model, cut):
    """The mean over tokens of each micro-batch's own loss, and its gradient, row by row without padding."""
    total = sum(len(row.token_ids) for batch in cut for row in batch if row.loss_weights.any())
    losses = 0.0
    for batch in cut:
        rows = [row for row in batch if row.loss_weights.any()]
        if not rows:
            continue
        by_row = [
            model.model(input_ids=torch.tensor(row.token_ids)[None], output_router_logits=True).router_logits
            for row in rows
        ]
        layers = tuple(torch.cat(parts) for parts in zip(*by_row, strict=True))
        loss = load_balancing_loss_func(layers, 4, 2) * sum(len(row.token_ids) for row in rows) / total
        loss.backward()
        losses += loss.item()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_coefficient_without_experts_is_refused_in_one_line(make_worker):
    with pytest.raises(ConfigError, match=r"moe_aux_coef keeps .*; qwen3 has none: set it to 0$"):
        make_worker(make_model("qwen3"), moe_aux_coef=0.1)
    with pytest.raises(ConfigError, match="deepseek_v3 has none that transformers can balance"):
        check_experts(make_model("deepseek_v3", num_key_value_heads=4))


def test_a_dense_critic_beside_a_mixture_of_experts_has_nothing_to_balance(make_worker, make_rows, normalizers):
    rows = make_rows(2)
    worker = make_worker(make_model("llama", "scalar"), role="critic", head="scalar", moe_aux_coef=0.1)
    assert "moe/aux_loss" not in worker.accumulate([rows], normalizers(rows))


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        ({2, 3}, 9, "flash_attention_3"), ({2, 3}, 8, "flash_attention_2"), ({2}, 9, "flash_attention_2"),
        ({3}, 9, "flash_attention_3"), (set(), 9, "torch_varlen"), (set(), 7, None),
    ],
)  # fmt: skip
def test_the_flash_kernel_is_the_fastest_one_of_the_gpu(monkeypatch, installed, capability, chosen):
    for version in (2, 3):
        monkeypatch.setattr(transformers.utils, f"is_flash_attn_{version}_available", lambda v=version: v in installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    config = transformers.Qwen3Config()
    assert flash_attention(config, transformers.AutoModelForCausalLM, torch.bfloat16) == chosen


def test_a_worker_that_was_given_a_gpu_that_torch_does_not_see_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"was given GPU 0 .* and torch sees none"):
        check_visible_gpu("cpu")
    check_visible_gpu("cuda")
    for value in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        check_visible_gpu("cpu")
