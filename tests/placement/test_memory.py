"""Sizes of models by their configurations alone, against the numbers of parameters that their makers publish."""

import json
from pathlib import Path

import pytest

from envgym.config.resolve import resolve
from envgym.config.words import nest_keys
from envgym.learner import LearnerConfig
from envgym.placement.memory import GIB, MemoryNeeds, ModelSizes, rank_memory, with_micro_batches
from envgym.placement.plan import Node, plan_of
from envgym.workers.config import WorkersConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

PUBLISHED = {
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151936,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True,
    }),
    "Qwen2.5-7B": (7_615_616_512, {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "tie_word_embeddings": False,
    }),
    "Qwen3-30B-A3B": (30_532_122_624, {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
    }),
    "Qwen1.5-MoE-A2.7B": (14_315_784_192, {
        "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 151936,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "tie_word_embeddings": False,
    }),
    "Mixtral-8x7B": (46_702_792_704, {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }),
    "Llama-3.1-8B": (8_030_261_248, {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "tie_word_embeddings": False,
    }),
    "gemma-2-2b": (2_614_341_888, {
        "model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "vocab_size": 256000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
    }),
    "DeepSeek-V2-Lite": (15_706_484_224, {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "vocab_size": 102400,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_alone_has_as_many_parameters_as_published(tmp_path, name):
    published, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSizes.from_folder(tmp_path).parameters == published


def test_what_a_token_meets_of_experts_is_its_inner_width(tmp_path):
    """Activations are counted by it."""
    _, config = PUBLISHED["Mixtral-8x7B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelSizes.from_folder(tmp_path).intermediate == 2 * 14336


def test_a_mixture_that_transformers_does_not_know_has_no_known_size(tmp_path):
    _, config = PUBLISHED["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    assert ModelSizes.from_folder(tmp_path) is None


def test_what_takes_turns_waits_in_host_memory(tmp_path):
    """7 B in bfloat16 with AdamW: weights, float32 gradients, and float32 weights and moments, about 120 GB."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-7B"][1]))

    def host_gb(colocate):
        settings = {"env": "math_verify", "model": str(tmp_path), "colocate": colocate, "learner.kl.coef": 0}
        stage = resolve(nest_keys(settings.items())).stages[0]
        plan = plan_of(stage, {}, [Node("one", 1, 80 * GIB)])
        [host] = [total for total in MemoryNeeds(stage, plan, {}, {}).totals() if total.device == "one"]
        return host.required / 1e9

    bare, in_turns = host_gb("auto"), host_gb("all")
    assert in_turns - bare == pytest.approx(7.6 * (2 + 4 + 12), rel=0.01)


@pytest.mark.parametrize(
    ("gpu_gib", "setting", "tokens"),
    [(90, "auto", 16_384), (58, "auto", 8_192), (40, "auto", 4_096), (None, "auto", 4_096), (80, 512, 512)],
)
def test_micro_batches_on_gpus_are_as_large_as_memory_allows(tmp_path, gpu_gib, setting, tokens):
    """Half of the GPU is the engine's."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-0.5B"][1]))
    settings = {"env": "math_verify", "model": str(tmp_path), "workers.tokens_per_microbatch": setting}
    [stage] = resolve(nest_keys([*settings.items(), ("learner.kl.coef", 0)])).stages
    plan = plan_of(stage, {}, [Node("here", 1, None if gpu_gib is None else gpu_gib * GIB, 500 * GIB)])
    assert with_micro_batches(stage, plan, {}, {}).workers.tokens_per_rank == tokens


def test_without_gpus_or_with_a_model_of_unknown_size_micro_batches_stay_small(tmp_path):
    for gpus, folder in ((0, "starter"), (1, str(tmp_path))):
        settings = {"env": "math_verify", "model": folder, "learner.kl.coef": 0}
        [stage] = resolve(nest_keys(settings.items())).stages
        plan = plan_of(stage, {}, [Node("here", gpus, 80 * GIB if gpus else None, 500 * GIB)])
        assert with_micro_batches(stage, plan, {}, {}) is stage


def test_the_plans_peaks_are_near_those_measured_on_an_h100(tmp_path):
    """`benchmarks/gpu_first.py`: a model of 0.5 billion parameters learns in bfloat16, in ZeRO stage 2."""
    config = {**PUBLISHED["Qwen2.5-0.5B"][1], "model_type": "qwen3", "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    measured = json.loads((RESULTS / "gpu_first.json").read_text())["steps"]["speed"]["figures"]
    for tokens in (4096, 16_384, 32_768):
        settings = WorkersConfig(tokens_per_microbatch=tokens)
        sizes = ModelSizes.from_folder(tmp_path)
        planned = rank_memory(sizes, settings, LearnerConfig(name="sft"), on_gpu=True).total / GIB
        assert 0.98 < planned / measured[str(tokens)]["peak_gib"] < 1.3
