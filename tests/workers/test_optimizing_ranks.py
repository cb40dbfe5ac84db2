"""Weights that two ranks move are those that one moves; a model that ranks share is never whole on each."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from envgym.learner import RoleSpec
from envgym.processes.local import LocalRuntime
from envgym.processes.runtime import InlineRuntime
from envgym.workers.config import WorkersConfig, WorkerSpec
from tests.weight_files import export_group


@pytest.fixture
def step_weights(tmp_path, tied_model, learner, make_rows, normalizers, run_group):
    """moved(runtime, …) -> the weights after two steps with Muon, some of them frozen, and their moving average."""

    async def body(group):
        for seed in (0, 1):
            rows = make_rows(11, seed)  # an odd number: one of two ranks gets a dummy
            await group.accumulate(rows, normalizers(rows))
            await group.step(1e-3)
        await export_group(group, tmp_path / "weights")
        await group.on_all(lambda rank: rank.save_average(str(tmp_path / "average")))
        return load_file(tmp_path / "weights"), load_file(tmp_path / "average" / "model.safetensors")

    def run(runtime, **settings):
        learner_settings = {
            "optimizer": "muon",
            "lr": 1e-3,
            "muon_lr": 1e-2,
            "ema_decay": 0.7,
            "freeze": [r"layers\.0\.mlp"],
        }
        settings = WorkersConfig(tokens_per_microbatch=60, dtype="float32", **settings)
        spec = WorkerSpec("actor", tied_model, RoleSpec(trained=True), {**learner, **learner_settings}, settings)
        return run_group(runtime, spec, body)

    return run


@pytest.fixture
def expected_weights(step_weights):
    return step_weights(InlineRuntime())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"zero_stage": 2}, marks=pytest.mark.slow),
        {"zero_stage": 3},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"zero_stage": 2, "offload_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_move_weights_as_one_does(step_weights, expected_weights, tmp_path, settings):
    """Shares of ZeRO 2 begin and end within a matrix, which Muon needs whole."""
    for actual, expected in zip(
        step_weights(LocalRuntime(tmp_path / "logs"), ranks=2, **settings), expected_weights, strict=True
    ):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            # The Newton-Schulz iteration makes the smallest directions of a gradient, and their rounding, which depends
            # on the processor, large.
            torch.testing.assert_close(actual[name], tensor, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_what_the_first_rank_alone_has_read_or_drawn_reaches_the_others(tmp_path, make_rows, run_group):
    """Not only parameters: this model's checkpoint has buffers that choose experts, and lacks the scalar head."""
    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=0,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_()
    model.save_pretrained(tmp_path / "model")
    rows = make_rows(5)
    settings = WorkersConfig(dtype="float32")
    spec = WorkerSpec("critic", str(tmp_path / "model"), RoleSpec(head="scalar"), settings=settings, seed=3)

    async def scores(group):
        return await group.forward(rows)

    expected = run_group(InlineRuntime(), spec, scores)
    spread = replace(spec, settings=WorkersConfig(dtype="float32", ranks=2, offload_parameters=True))
    for score, expected_score in zip(run_group(LocalRuntime(tmp_path / "logs"), spread, scores), expected, strict=True):
        torch.testing.assert_close(torch.tensor(score), torch.tensor(expected_score), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_model_that_ranks_share_is_whole_on_the_first_only(tmp_path, run_group):
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size / 2**20
    assert size > 100

    async def peaks(group):
        """MiB: the most that each rank has held, and what it holds."""
        statuses = [Path(f"/proc/{handle.pid}/status").read_text() for handle in group._handles]
        return [
            [int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("VmHWM", "VmRSS")]
            for status in statuses
        ]

    # a trial of shared prefixes gathers parameters, as every forward pass does
    settings = WorkersConfig(ranks=2, zero_stage=3, dtype="float32", share_prefixes=False)
    spec = WorkerSpec("reference", str(tmp_path / "model"), RoleSpec(), settings=settings)
    (most_of_first, _), (most_of_second, held_by_second) = run_group(LocalRuntime(tmp_path / "logs"), spec, peaks)
    assert most_of_second - held_by_second < 0.25 * size  # nothing was there that has gone
    assert most_of_first - most_of_second > 0.5 * size  # and the measure sees a whole model
