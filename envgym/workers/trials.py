"""Trials of a loaded model: kernels and layouts of rows that its code may not support.

Each is used where its numbers for two short rows are those of the plain way, up to rounding, and left out otherwise.
`engine` is DeepSpeed's engine around a network, or the network itself. All calls are collective.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from envgym.errors import ConfigError
from envgym.learner import pad
from envgym.types import Objective, Row

from .attention import VARLEN
from .fused_layers import can_fuse, fuse
from .head import LogprobHead, score
from .micro_batches import network_inputs
from .network import TokenNetwork, install_path_masks
from .packing import packs


def try_kernel(network: TokenNetwork, engine: Any, device: torch.device) -> str:
    """Let a network with torch's kernel for rows of different lengths keep it if it answers as with `sdpa`, which the
    network gets otherwise. Returns the reason, or an empty string."""
    config = network.model.config
    if config._attn_implementation != VARLEN:
        return ""
    engine.eval()
    config._attn_implementation = "sdpa"
    plain = _trial(network, engine, device)
    config._attn_implementation = VARLEN
    reason = _difference(network, engine, device, plain)
    if reason:
        config._attn_implementation = "sdpa"
    return reason and f"attention is sdpa, since torch's varlen_attn {reason}"


def try_fused_layers(network: TokenNetwork, engine: Any, device: torch.device) -> str:
    """Fuse layers of the network where liger-kernel can and the network answers as before. Returns the reason if it
    does not, or an empty string."""
    if not can_fuse(network.model, device):
        return ""
    engine.eval()
    plain = _trial(network, engine, device)
    undo = fuse(network.model)
    reason = _difference(network, engine, device, plain)
    if reason:
        undo()
    return reason and f"layers are not fused, since with liger-kernel the model {reason}"


def try_fused_head(network: TokenNetwork, device: torch.device) -> str:
    """Let an `lm` head use its kernels if they run here and give what the plain form gives for drawn numbers. Returns
    the reason if they do not, or an empty string."""
    head = network.model.get_output_embeddings()
    if not isinstance(head, LogprobHead) or not can_fuse_head(head, device):
        return ""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(count, 64, generator=generator).to(device, head.weight.dtype) for count in (16, 999)]
    targets, temperatures = torch.arange(16, device=device) * 60, torch.ones(16, device=device)

    def gradients(fused: bool) -> torch.Tensor:
        states, weight = (tensor.clone().requires_grad_() for tensor in numbers)
        logprobs, entropies = score(
            states, weight, None, targets, temperatures, head.rescaling, entropy=True, graph=True, fused=fused
        )
        (logprobs.sum() + entropies.sum()).backward()
        return torch.cat([logprobs.detach(), entropies.detach(), states.grad.flatten(), weight.grad.flatten()])

    try:
        head.fused = _agree(network, gradients(True), gradients(False))
    except Exception as error:  # such as Triton without a compiler for C
        return f"the head is not fused, since its kernel fails ({_summary(error)})"
    return "" if head.fused else "the head is not fused, since its kernel answers otherwise"


def can_fuse_head(head: LogprobHead, device: torch.device) -> bool:
    """True if the head's kernels are made for this device and number format, and Triton is installed."""
    return device.type == "cuda" and head.weight.dtype != torch.float64 and find_spec("triton") is not None


def _difference(network: TokenNetwork, engine: Any, device: torch.device, reference: torch.Tensor) -> str:
    """Compare the network's `_trial` with an earlier one. Returns the difference in words, or an empty string."""
    try:
        numbers = _trial(network, engine, device)
    except Exception as error:  # whatever a kernel makes of a device or a model that it does not know
        return f"fails ({_summary(error)})"
    return "" if _agree(network, numbers, reference) else "answers otherwise"


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def use_packing(network: TokenNetwork, engine: Any, setting: bool | Literal["auto"], device: torch.device) -> None:
    """Set `network.packed` where `packs` allows it and the model's outputs for the same rows, packed and padded, agree:
    then rows do not attend to each other.

    Raises `ConfigError` where packing is set to true and rows attend to each other.
    """
    if not packs(setting, network.model):
        return
    engine.eval()
    padded = _trial(network, engine, device)
    network.packed = True
    network.packed = _agree(network, _trial(network, engine, device), padded)
    if setting is True and not network.packed:
        kind = network.model.config._attn_implementation
        raise ConfigError(
            f"workers.packing=true does not work with {network.model.config.model_type} and {kind}: rows see each other"
        )


def _trial(network: TokenNetwork, engine: Any, device: torch.device, *, shared: bool = False) -> torch.Tensor:
    """[N] the network's numbers for two rows of 9 and 7 tokens, of which the first five are the same."""
    samples = []
    for row in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 8]):
        token_ids = np.array(row) % network.model.get_input_embeddings().num_embeddings
        weights, no_logprobs = np.minimum(np.arange(len(row)), 1), np.full(len(row), np.nan)
        samples.append(Row.from_arrays(token_ids, weights, no_logprobs, Objective.CROSS_ENTROPY))
    inputs = network_inputs(samples, [pad(samples, device)], device, "shared" if shared else "padded")
    with torch.no_grad():
        outputs = engine(*inputs)
    outputs.pop("balance", None)
    numbers = next(iter(outputs.values()))
    mask: torch.Tensor = inputs[2]
    return numbers[mask]


def _agree(network: TokenNetwork, numbers: torch.Tensor, reference: torch.Tensor) -> bool:
    """True if two results of `_trial` differ by rounding only."""
    tolerance = 1e-4 if next(network.parameters()).dtype == torch.float32 else 2e-2
    return bool((numbers - reference).abs().mean() < tolerance * reference.abs().mean())


def obstacle_to_sharing(network: TokenNetwork, engine: Any, device: torch.device, *, trained: bool) -> str:
    """The reason why prefixes that rows share cannot be computed once, or an empty string.

    Whether a model supports it is tried out: attention that does not know a `PathMask` fails, or answers otherwise.
    """
    model = network.model
    if trained:
        engine.train()
        if not _agree(network, _trial(network, engine, device), _trial(network, engine, device)):
            return "the model draws noise (such as dropout) for each sequence"
    engine.eval()
    if model.config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        return "the model has attention of its own"
    install_path_masks(model)
    padded = _trial(network, engine, device)
    try:
        shared = _trial(network, engine, device, shared=True)
    except Exception as error:  # whatever the model's code makes of what it does not know
        return f"the model has attention of its own ({type(error).__name__})"
    return "" if _agree(network, shared, padded) else "the outputs would differ"
