"""FLOPs of a token, counted by hand for tiny architectures."""

import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from envgym.processes.gpus import peak_flops
from envgym.workers.export import flops_per_token

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 10,
}
LAYER_ATTENTION = 16 * 20 + 2 * 16 * 10 + 20 * 16  # query, key and value, output
LAYER = LAYER_ATTENTION + 3 * 16 * 24 + 2 * 16 + 2 * 10  # and the feed-forward part; norms of states, queries and keys
BODY = 3 * LAYER + 16
EMBEDDING = 50 * 16
ATTENTION = 12 * 3 * 2 * 10


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_embedding_is_only_looked_up_and_the_head_is_multiplied_with(is_tied):
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=is_tied))
    assert flops_per_token(model) == (6 * (BODY + EMBEDDING), ATTENTION)


def test_a_scalar_head_is_small():
    model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, num_labels=1))
    assert flops_per_token(model) == (6 * (BODY + 16), ATTENTION)


def test_frozen_weights_have_no_gradient_of_their_own():
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    model.model.requires_grad_(False)
    assert flops_per_token(model) == (4 * BODY + 6 * EMBEDDING, ATTENTION)


def test_layers_that_see_a_window_are_left_out_of_what_grows_with_length():
    layers = ["full_attention", "sliding_attention", "full_attention"]
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, layer_types=layers, use_sliding_window=True, sliding_window=4))
    assert flops_per_token(model)[1] == ATTENTION * 2 / 3


def test_a_token_meets_few_of_the_experts():
    config = Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True
    )
    layer = LAYER_ATTENTION + 2 * 16 + 2 * 10 + 16 * 4 + 2 * 3 * 16 * 8  # router, two of four experts
    assert flops_per_token(Qwen3MoeForCausalLM(config)) == (6 * (3 * layer + 16 + EMBEDDING), ATTENTION)


def test_by_torchs_own_count_of_a_step():
    """Norms, which the formula counts and torch does not, are the difference."""
    from torch.utils.flop_counter import FlopCounterMode

    config = Qwen3Config(**{**SHAPE, "hidden_size": 64, "intermediate_size": 256}, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    length = 32
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(50, (1, length)), use_cache=False).logits.sum().backward()
    a, b = flops_per_token(model)
    assert counter.get_total_flops() == pytest.approx((a + b * length) * length, rel=0.01)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_flops_by_name(name, flops):
    assert peak_flops(name, "bfloat16") == flops
    assert peak_flops(name, "float32") is None
