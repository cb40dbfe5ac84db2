"""Parameters of a model, whole: their numbers wherever ranks keep them, in files, how many they are, and what a token
costs."""

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


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's numbers, also where ranks have a part each, who then must call together; those kept in 4 bits come
    in the number format they are computed with."""
    with zero.gathered(parameter):
        if hasattr(parameter, "ds_id"):
            return tensor_parallel.joined(parameter, parameter.detach()).cpu().clone()
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return tensor_parallel.joined(parameter, parameter.detach())
    import bitsandbytes

    numbers: torch.Tensor = bitsandbytes.functional.dequantize_4bit(parameter.detach(), state)
    return numbers


def n_numbers(parameter: nn.Parameter) -> int:
    """Number of numbers a parameter stands for, wherever they are and however they are kept."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return math.prod(state.shape)
    return tensor_parallel.n_numbers(parameter)


def whole_parameters(
    model: nn.Module, adapter: Adapter | None, rank: int, *, merged: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model (from Hugging Face), whole, one at a time; on ranks other than 0, which take part in
    gathering them, without their numbers. A tied head is none of its own. `merged`: with the adapter added to them,
    where there is one."""
    if adapter is not None:
        named = adapter.parameters(lambda _, p: whole(p), merged=merged)
        yield from ((name, numbers if rank == 0 else numbers.to("meta")) for name, numbers in named)
        return
    for name, parameter in model.named_parameters():
        with zero.gathered(parameter):
            numbers = tensor_parallel.joined(parameter, parameter.detach())
            passing = hasattr(parameter, "ds_id") or numbers.data_ptr() != parameter.data_ptr()
            if rank:
                numbers = numbers.to("meta")
            elif passing:
                numbers = numbers.cpu().clone()
        yield name, numbers


def averaged_parameters(
    model: nn.Module, adapter: Adapter | None, average: MovingAverage, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same with the moving average in place of the parameters that have one, in the model's own number format."""

    def read(name: str, parameter: nn.Parameter) -> torch.Tensor:
        return average.whole(name, device).to(parameter.dtype) if name in average else whole(parameter)

    if adapter is not None:
        yield from adapter.parameters(read, merged=True)
        return
    yield from ((name, read(name, parameter)) for name, parameter in model.named_parameters())


def as_in_checkpoints(
    model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a model (from Hugging Face) by the names and in the pieces that its checkpoints have: transformers
    keeps a layer's experts in one tensor, and renames modules as it loads."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, numbers in named:
        yield from revert_weight_conversion(model, {name: numbers}).items()


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """(a, b): training `model` (from Hugging Face) on one token of a sequence of T takes a + b T FLOPs.

    A training step computes 6 N per token: 2 for each of N weights forward (a multiplication and an addition), twice
    that backward. J. Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1. To it comes
    attention itself, 12 x heads x width of a head for every layer and every token of the sequence: A. Chowdhery et al.,
    "PaLM" (2022), appendix B, which counts the whole sequence although a causal kernel may skip half of it. What is
    computed twice to save memory does not count: it is the model's computing that is measured.

    N is of weights that are multiplied with: without the embedding, of which a row is only looked up (a head that is
    tied to it is multiplied with), and of experts only as many as a token meets. A frozen weight needs 4 instead of
    6: no gradient of its own is computed. Layers whose attention sees a window are left out of b, so that long
    sequences never count as more than they take.
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
