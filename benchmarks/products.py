"""Seconds of a training step's matrix products alone, in bare torch: a bound that no framework gets below.

Attention, norms, the loss, sampling and the optimizer are left out. A prompt is computed once for all its answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

MICROBATCH = 4096
"""Tokens of a product in learning."""


def seconds_of_products(folder: Path, prompts: int, prompt_length: int, answers: Sequence[int]) -> dict[str, float]:
    """By phase. `answers`: the lengths of all completions, in tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = model.get_output_embeddings()
    body = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    rollout = _forward(body, prompts * prompt_length) + _forward([head], prompts)
    for position in range(1, max(answers)):
        rollout += _forward([*body, head], sum(length > position for length in answers))
    learn, left = 0.0, prompts * prompt_length + sum(answers)
    while left:
        n_tokens = min(left, MICROBATCH)
        learn += 3 * _forward(body, n_tokens)  # each gradient, of inputs and of weights, is a product as large
        left -= n_tokens
    return {"rollout": rollout, "learn": learn + 3 * _forward([head], sum(answers))}


@torch.inference_mode()
def _forward(layers: Sequence[torch.nn.Linear], n_tokens: int) -> float:
    """Median of five passes of `n_tokens` through the layers' matrices."""
    seconds = []
    inputs = {layer.in_features: torch.randn(n_tokens, layer.in_features) for layer in layers}
    for _ in range(6):
        start = time.perf_counter()
        for layer in layers:
            inputs[layer.in_features] @ layer.weight.T
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
