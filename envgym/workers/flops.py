"""How much computing a token needs, and how much a device can do: their ratio is model-FLOPs utilisation.

A training step computes 6 N per token: 2 for each of N weights forward (a multiplication and an addition), twice that
backward. J. Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1. To it comes attention itself,
12 x heads x width of a head for every layer and every token of the sequence: A. Chowdhery et al., "PaLM" (2022),
appendix B, which counts the whole sequence although a causal kernel may skip half of it. What is computed twice to
save memory does not count: it is the model's computing that is measured.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .adapter import n_numbers

PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
"""Dense 16-bit matrix FLOPs a second, from the makers' data sheets, by a part of the device's name; the more precise
name comes first."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """What the named device can do at most, in FLOPs a second; None where that is not known, as in float32."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((flops for name, flops in PEAK_FLOPS.items() if _names(device_name, name)), None)


def _names(device_name: str, part: str) -> bool:
    """Whether the words of `part` follow each other in the name ("A10" is not in "NVIDIA A100")."""
    return f" {part} " in f" {device_name.replace('-', ' ').replace('/', ' ')} "


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """(a, b): training `model` (from Hugging Face) on one token of a sequence of T takes a + b T FLOPs.

    N is of weights that are multiplied with: without the embedding, of which a row is only looked up (a head that is
    tied to it is multiplied with), and of experts only as many as a token meets. A frozen weight needs 4 instead of
    6: no gradient of its own is computed. Layers whose attention sees a window are left out of b, so that long
    sequences are never said to take more than they do.
    """
    config = model.config.get_text_config()
    experts = n_experts(config)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    a = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding.weight and not tied:
            continue
        met = share if ".experts." in name else 1.0
        a += met * (6 if parameter.requires_grad else 4) * n_numbers(parameter)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return a, 12.0 * config.num_attention_heads * width * kinds.count("full_attention")


def n_experts(config: Any) -> int:
    """Experts of a layer, by the names that Hugging Face configs give it; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)
