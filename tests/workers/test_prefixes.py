"""Prefixes that rows share are computed once, with the outputs and gradients of plain rows."""

import asyncio
import contextlib
import math
import re
import sys
import types
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from envgym.learner import RoleSpec, pad
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime
from envgym.types import Objective, Row
from envgym.workers.config import WorkersConfig, WorkerSpec
from envgym.workers.group import WorkerGroup
from envgym.workers.lora import LoraConfig
from envgym.workers.micro_batches import SharedPrefixes, micro_batches, n_distinct, network_inputs, shared_share
from envgym.workers.network import TokenNetwork, install_path_masks, load_model
from envgym.workers.trials import obstacle_to_sharing
from tests.weight_files import export_group
from tests.workers.conftest import PLAIN_GRADIENT_DESCENT
from tests.workers.test_network import VOCABULARY, by_hand, make_model

CPU = torch.device("cpu")
BY_ENDS = "flash_attention_by_hand"


def sample(token_ids, index=0, seed=0, objective=Objective.POLICY_GRADIENT):
    """A row whose tokens are asked about at random; its first token has no prediction."""
    rng = np.random.default_rng((seed, index))
    weights = (rng.random(len(token_ids)) < 0.7).astype(np.float32) * rng.random(len(token_ids)).astype(np.float32)
    weights[0] = 0.0
    old = np.where(rng.random(len(token_ids)) < 0.3, -1.0, np.nan).astype(np.float32)
    old[0] = np.nan
    temperatures = np.full(len(token_ids), rng.choice([0.7, 1.0, 1.3]), np.float32)
    return Row.from_arrays(
        np.asarray(token_ids), weights, old, objective, temperatures=temperatures, microbatch_key=index
    )


@st.composite
def tries(draw):
    """Rows that end anywhere in a trie up to 4 deep: equal ones, prefixes of others, and rows alone, in any order."""
    tokens = st.lists(st.integers(1, VOCABULARY - 1), max_size=6)
    rows = []

    def grow(path, depth):
        path = path + draw(tokens)
        rows.append(path)
        if depth < 4:
            for _ in range(draw(st.integers(0, 3 if depth < 2 else 2))):
                grow(path, depth + 1)

    for _ in range(draw(st.integers(1, 3))):
        grow([draw(st.integers(1, 3))], 0)
    return [sample(row, index) for index, row in enumerate(draw(st.permutations(rows))[:24])]


@given(samples=tries())
@settings(deadline=None)
def test_each_distinct_prefix_stands_once_at_its_position_in_the_row(samples):
    prefixes = SharedPrefixes(samples, CPU)
    distinct = {tuple(s.token_ids[: end + 1]) for s in samples for end in range(len(s))}
    assert len(prefixes) == n_distinct(samples) == len(distinct)
    assert shared_share(samples) == pytest.approx(1 - len(distinct) / sum(map(len, samples)))
    for index, row in zip(prefixes.index, samples, strict=True):
        path = index[: len(row)]
        assert prefixes.token_ids[path].tolist() == row.token_ids.tolist()
        assert prefixes.positions[path].tolist() == list(range(len(row)))
    valid = torch.arange(prefixes.index.shape[1]) < torch.tensor([[len(s)] for s in samples])
    assert prefixes.counts(valid).sum() == valid.sum()


# -- outputs and gradients --------------------------------------------------------------------------------


def results(network, samples, layout):
    """Outputs of real tokens in training mode, and the gradient of a weighted sum of them."""
    network.train().zero_grad()
    inputs = network_inputs(samples, [pad(samples, CPU)], CPU, layout)
    outputs = network(*inputs)
    valid = torch.arange(inputs[0].shape[1]) < inputs[1][:, None]
    torch.manual_seed(1)
    loss = sum((torch.randn(n.shape) * n)[valid].sum() for name, n in outputs.items() if n.ndim == 2)
    (loss + outputs.get("balance", 0.0)).backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    return {name: n[valid] if n.ndim == 2 else n for name, n in outputs.items()}, gradients


def errors(network, samples):
    """The largest difference of an output, and of a gradient relative to its norm plus a tenth of the whole gradient's:
    that of a key's bias is nothing but rounding."""
    (plain, plain_grads), (shared, grads) = (results(network, samples, layout) for layout in ("padded", "shared"))
    assert plain.keys() == shared.keys()
    assert plain_grads.keys() == grads.keys()
    whole = math.hypot(1e-30, *(float(g.norm()) for g in plain_grads.values()))
    return (
        max(float((plain[n] - shared[n]).detach().abs().max()) for n in plain),
        max(float((g - grads[n]).norm() / (g.norm() + whole / 10)) for n, g in plain_grads.items()),
    )


ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "mistral": {},  # a window of 4
    "gemma2": {"attention": "eager", "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mixtral": {},
    "qwen3_moe": {},
}
NETWORKS = {}


def network_of(architecture, head="lm", double=False, **options):
    key = (architecture, head, double, *sorted(options))
    if key not in NETWORKS:
        model = make_model(architecture, head, **ARCHITECTURES[architecture] | options)
        model = model.double() if double else model
        balance = head == "lm" and architecture in ("mixtral", "qwen3_moe")
        NETWORKS[key] = TokenNetwork(model, head, entropy=True, balance=balance)
        assert obstacle_to_sharing(NETWORKS[key], NETWORKS[key], CPU, trained=True) == ""
    return NETWORKS[key]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(samples=tries())
@settings(deadline=None, max_examples=15)
def test_outputs_and_gradients_are_those_of_plain_rows(architecture, samples):
    output, gradient = errors(network_of(architecture), samples)
    assert output < 1e-5
    assert gradient < 1e-5


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "opt"])
def float64_network(request):
    """A network that computes in float64 throughout: transformers' norms and rotations compute in float32."""
    network = network_of(request.param, double=True)
    code = sys.modules[type(network.model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        double = types.SimpleNamespace(**vars(torch) | {"float32": torch.float64, "float": torch.float64})
        patch.setattr(code, "torch", double)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield network


@given(samples=tries())
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_in_float64_they_agree_to_its_precision(float64_network, samples):
    output, gradient = errors(float64_network, samples)
    assert output < 1e-10
    assert gradient < 1e-10


@given(samples=tries())
@settings(deadline=None, max_examples=15)
def test_so_are_the_values_of_a_critic(samples):
    output, gradient = errors(network_of("llama", "scalar"), samples)
    assert output < 1e-5
    assert gradient < 1e-5


def test_rows_that_see_each_other_are_noticed():
    """The control: the flat sequence of a layout with an ordinary causal mask, in which siblings see each other."""
    samples = [sample([1, 2, 3, 4, 5]), sample([1, 2, 3, 6, 7], 1)]
    network = TokenNetwork(make_model("qwen2"), "lm", entropy=True)
    expected, _ = results(network, samples, "padded")
    install_path_masks(network.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("envgym.workers.network.attention_over", contextlib.nullcontext)
        wrong, _ = results(network, samples, "shared")
    assert (wrong["logprobs"] - expected["logprobs"]).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_a_flash_kernel_is_told_where_new_tokens_and_paths_end(architecture):
    """With a stand-in for the kernel, on a CPU."""
    samples = [sample(row, index) for index, row in enumerate(([1, 2, 3, 4], [1, 2, 3, 5, 6, 7, 8], [9, 8], [1, 2]))]
    expected = results(TokenNetwork(make_model(architecture), "lm", entropy=True), samples, "padded")
    network = TokenNetwork(make_model(architecture), "lm", entropy=True)
    network.model.config._attn_implementation_internal = BY_ENDS
    install_path_masks(network.model)
    torch.testing.assert_close(results(network, samples, "shared"), expected, atol=1e-5, rtol=1e-5)


def attend_by_ends(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None, **told):
    """A flash kernel for rows of different lengths: the last query of a row sees its last key."""
    assert mask is None
    result, repeats = [], query.shape[1] // key.shape[1]
    for (q_start, q_stop), (start, stop) in zip(pairwise(cu_seq_lens_q), pairwise(cu_seq_lens_k), strict=True):
        assert q_stop - q_start <= told["max_length_q"]
        assert stop - start <= told["max_length_k"]
        q, k, v = query[:, :, q_start:q_stop], *(states[:, :, start:stop] for states in (key, value))
        steps = torch.arange(stop - start)
        ago = steps[-q.shape[2] :, None] - steps
        hidden = (ago < 0) | (ago >= (told.get("sliding_window") or len(steps)))
        scores = (q @ k.repeat_interleave(repeats, 1).transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
        result.append(scores.softmax(-1) @ v.repeat_interleave(repeats, 1))
    return torch.cat(result, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_ENDS, attend_by_ends)
AttentionMaskInterface.register(BY_ENDS, flash_attention_mask)


@pytest.mark.parametrize(
    ("architecture", "options", "obstacle"),
    [
        ("qwen3_next", {}, "the outputs would differ"),
        ("jamba", {}, "the outputs would differ"),
        ("bloom", {"attention": "eager"}, r"the model has attention of its own \(TypeError\)"),
        (
            "opt",
            {"ffn_dim": 48, "word_embed_proj_dim": 32},
            "the model draws noise .* for each sequence",
        ),
    ],
)
def test_a_model_that_would_differ_computes_plain_rows_and_the_reason_is_known(architecture, options, obstacle):
    network = TokenNetwork(make_model(architecture, **options), "lm")
    assert re.fullmatch(obstacle, obstacle_to_sharing(network, network, CPU, trained=True))


# -- in workers -------------------------------------------------------------------------------------------


def group_of_rows(n_groups=3, size=4, prompt=12, longest=9, objective=Objective.POLICY_GRADIENT, key_per_group=False):
    """Groups of answers to a prompt, in an order in which no two of a group follow each other."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, prompt) for _ in range(n_groups)]
    rows = []
    for index in range(n_groups * size):
        answer = rng.integers(1, VOCABULARY, rng.integers(1, longest))
        row = sample(np.concatenate([prompts[index % n_groups], answer]), index, objective=objective)
        row.loss_weights[:prompt], row.loss_weights[prompt:], row.episode_index = 0.0, 1.0, index
        row.old_logprobs[:] = np.nan
        if key_per_group:
            row.microbatch_key = index % n_groups
        rows.append(row)
    return rows


def learned(tmp_path, model, rows, learner, *, ranks=1, role="actor", lora=None, steps=1, **settings):
    """Scores before `steps` steps of plain gradient descent on all rows, the last one's metrics, and the weights."""
    settings = {"tokens_per_microbatch": 60, "dtype": "float32", "deepspeed": PLAIN_GRADIENT_DESCENT} | settings
    head = "lm" if role == "actor" else "scalar"
    config = WorkersConfig(ranks=ranks, **settings)
    normalizers = {o: float(sum(r.loss_weights.sum() for r in rows if r.objective == o)) for o in Objective}

    async def main():
        runtime = InlineRuntime() if ranks == 1 else LocalRuntime(tmp_path / "logs")
        try:
            spec = WorkerSpec(role, model, RoleSpec(trained=True, head=head), learner, config, lora or LoraConfig())
            group = await WorkerGroup.start(runtime, spec)
            try:
                scores = await group.forward(rows)
                for _ in range(steps):
                    metrics = await group.accumulate(rows, normalizers) | await group.step(1.0)
                await export_group(group, tmp_path / "weights")
                return group.info, scores, metrics, load_file(tmp_path / "weights")
            finally:
                await group.close()
        finally:
            await runtime.close()

    return asyncio.run(main())


def assert_same(tmp_path, model, rows, learner, *, share_at_least=0.3, shared=None, **settings):
    """A worker learns the same with shared prefixes (and with the settings `shared`) as with plain rows."""
    _, plain_scores, plain_metrics, plain = learned(
        tmp_path, model, rows, learner, **settings | {"share_prefixes": False}
    )
    info, scores, metrics, weights = learned(tmp_path, model, rows, learner, **settings | (shared or {}))
    assert info.not_shared == ""
    assert metrics.pop("tokens/shared_share") > share_at_least
    for actual, expected in zip(scores, plain_scores, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    for name in plain_metrics.keys() - {"memory/max"}:
        assert metrics[name] == pytest.approx(plain_metrics[name], rel=1e-4, abs=1e-6), name
    for name, tensor in plain.items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"packing": True}, {"role": "critic"}])
def test_a_worker_learns_the_same(options, tmp_path, tied_model, learner):
    assert_same(tmp_path, tied_model, group_of_rows(), learner, **options)


def test_so_it_does_in_several_steps_on_rows_of_which_some_are_on_policy(tmp_path, tied_model, learner):
    rows = group_of_rows()
    for index, row in enumerate(rows):
        row.is_on_policy = index % 3 == 0
        row.old_logprobs[12:] = np.random.default_rng(index).normal(-5.5, 0.2, len(row) - 12)
    assert_same(tmp_path, tied_model, rows, learner, steps=3)


def test_so_does_an_adapter(tmp_path, untied_model, learner):
    assert_same(tmp_path, untied_model, group_of_rows(), learner, lora=LoraConfig(rank=4))


@pytest.mark.parametrize("zero_stage", [pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)] + [3])
def test_two_ranks_learn_what_one_learns_of_plain_rows(zero_stage, tmp_path, tied_model, learner):
    rows = group_of_rows(n_groups=4)
    assert_same(tmp_path, tied_model, rows, learner, shared={"ranks": 2, "zero_stage": zero_stage})


def test_units_stay_whole_and_a_group_over_the_budget_is_cut(tmp_path, tied_model, learner):
    rows = group_of_rows(n_groups=2, size=8, objective=Objective.PREFERENCE, key_per_group=True)
    [batches] = micro_batches(rows, 20, 1, layout="shared")
    assert [{row.microbatch_key for row in batch} for batch in batches] in ([{0}, {1}], [{1}, {0}])
    for row in rows:
        row.microbatch_key = row.episode_index
    [batches] = micro_batches(rows, 40, 1, layout="shared")
    assert all(n_distinct(batch) <= 40 for batch in batches)
    assert all(len({row.token_ids[0] for row in batch}) == 1 for batch in batches), "a prompt is not repeated in vain"


def test_experts_are_balanced_by_every_tokens_rows(tmp_path, learner):
    rows = group_of_rows()
    [cut] = micro_batches(rows, 60, 1, layout="shared")
    weights, metrics = {}, {}
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    for coefficient in (0.0, 0.5):
        config = learner | {"moe_aux_coef": coefficient}
        info, _, metrics, weights[coefficient] = learned(tmp_path, str(tmp_path / "model"), rows, config)
        assert info.not_shared == ""
    loss, expected = by_hand(make_model("qwen3_moe"), cut)
    assert metrics["moe/aux_loss"] == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(weights[0.0][name] - weights[0.5][name], 0.5 * gradient, atol=2e-6, rtol=1e-4)


def test_where_too_little_is_shared_and_where_it_is_turned_off_rows_are_plain(tmp_path, tied_model, learner):
    alone = [sample(np.random.default_rng(index).integers(1, VOCABULARY, 9), index) for index in range(6)]
    _, _, metrics, _ = learned(tmp_path, tied_model, alone, learner)
    assert "tokens/shared_share" not in metrics
    info, _, metrics, _ = learned(tmp_path, tied_model, group_of_rows(), learner, share_prefixes=False)
    assert "tokens/shared_share" not in metrics
    assert info.not_shared == "workers.share_prefixes=false"


def test_gemma_2_attends_with_its_cap_of_logits(tmp_path):
    model = make_model("gemma2", attention="eager", attn_logit_softcapping=2.0)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "lm", torch.float32).config._attn_implementation == "eager"
    make_model("qwen2").save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "lm", torch.float32).config._attn_implementation == "sdpa"
