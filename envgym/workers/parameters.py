"""Full parameters of a model, gathered from the ranks that hold parts; their names in checkpoints, their number, and
the FLOPs per token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import tensor_parallel, zero

if TYPE_CHECKING:
    from .adapter import Adapter
    from .optimizer import MovingAverage


def full_tensor(parameter: nn.Parameter, *, discarded: bool = False) -> torch.Tensor:
    """The full tensor of a parameter, gathered where ranks hold parts (then a collective call, and the tensor is on the
    host). A 4-bit parameter is returned in the number format that it is computed with. `discarded`: this rank only
    takes part, and gets a tensor on the meta device."""
    with zero.gathered_parameter(parameter):
        numbers: torch.Tensor = tensor_parallel.gather_parts(parameter, parameter.detach())
        if discarded:
            return numbers.to("meta")
        if hasattr(parameter, "ds_id") or numbers.data_ptr() != parameter.data_ptr():
            return numbers.cpu().clone()
    if (state := getattr(parameter, "quant_state", None)) is None:
        return numbers
    import bitsandbytes

    numbers = bitsandbytes.functional.dequantize_4bit(parameter.detach(), state)
    return numbers


def n_numbers(parameter: nn.Parameter) -> int:
    """Number of numbers in a parameter, also if it is partitioned or stored in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    return tensor_parallel.n_numbers(parameter)


def full_parameters(
    model: nn.Module, adapter: Adapter | None, rank: int, *, merged: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The full parameters of a model (from Hugging Face), one at a time. Ranks other than 0 take part in gathering and
    get tensors on the meta device. A tied head is not repeated. `merged`: an adapter is added, in this format."""
    if adapter is not None:
        parameters = adapter.parameters(lambda _, p: full_tensor(p), merged=merged)
        yield from ((name, numbers if rank == 0 else numbers.to("meta")) for name, numbers in parameters)
        return
    for name, parameter in model.named_parameters():
        yield name, full_tensor(parameter, discarded=rank > 0)


def averaged_parameters(
    model: nn.Module, adapter: Adapter | None, average: MovingAverage, device: torch.device, merged: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The full parameters, or their moving averages where they have one, in the model's number format; with an adapter
    merged into them, in `merged`."""

    def read(name: str, parameter: nn.Parameter) -> torch.Tensor:
        return average.full_tensor(name, device).to(parameter.dtype) if name in average else full_tensor(parameter)

    if adapter is not None:
        return adapter.parameters(read, merged=merged)
    return ((name, read(name, parameter)) for name, parameter in model.named_parameters())


def as_in_checkpoints(
    model: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a model (from Hugging Face) under the names and in the pieces of its checkpoints: transformers
    stores a layer's experts in one tensor, and renames modules on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, numbers in parameters:
        yield from revert_weight_conversion(model, {name: numbers}).items()


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """(a, b): training `model` (from Hugging Face) on one token of a sequence of T takes a + b T FLOPs.

    A training step computes 6 N per token: 2 for each of N weights forward (a multiplication and an addition), twice
    that backward. J. Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1. Attention adds
    12 x heads x width of a head for every layer and every token of the sequence: A. Chowdhery et al., "PaLM" (2022),
    appendix B, which counts the whole sequence although a causal kernel may skip half of it. Recomputation to save
    memory does not count.

    N counts the weights of matrix products: not the embedding, which is only looked up (but a head tied to it), and of
    the experts only as many as a token is routed to. A frozen weight needs 4 instead of 6 FLOPs, since no gradient of
    it is computed. Layers with windowed attention are omitted from b, so that long sequences are never overcounted.
    """
    config = model.config.get_text_config()
    experts = n_experts(config)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    a = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding.weight and not is_tied:
            continue
        fraction = share if ".experts." in name else 1.0
        a += fraction * (6 if parameter.requires_grad else 4) * n_numbers(parameter)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return a, 12.0 * config.num_attention_heads * width * kinds.count("full_attention")


def n_experts(config: Any) -> int:
    """Number of experts per layer in a Hugging Face config; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)
