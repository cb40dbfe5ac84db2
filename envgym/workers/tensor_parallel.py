"""Tensor parallelism: the ranks of a group hold one part each of every large matrix, and have the same rows.

DeepSpeed's AutoTP cuts the model when its engine is made, by the plan that transformers has for the architecture. Here
is what it leaves to others: which models it can cut, and numbers that need all parts of a parameter. The embeddings and
the output layer stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError


def json(size: int) -> dict[str, Any]:
    """The part of DeepSpeed's JSON that has it cut the model."""
    return {"autotp_size": size, "vocab_parallel_lm_head": False}


def check(model: nn.Module, size: int) -> None:
    """Raise `ConfigError` for a model (from Hugging Face) that cannot be cut in `size` parts."""
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    config = model.config.get_text_config()
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - SUPPORTED_STYLES)
    heads = {"attention heads": "num_attention_heads", "key and value heads": "num_key_value_heads"}
    counts = {kind: getattr(config, name, size) for kind, name in heads.items()}
    obstacle = ""
    if not plan:
        obstacle = "transformers has no plan for it"
    elif unknown:
        obstacle = f"DeepSpeed cannot cut layers the way transformers plans it ({', '.join(unknown)})"
    elif undivided := [f"{count} {kind}" for kind, count in counts.items() if count % size]:
        obstacle = f"it does not divide the {undivided[0]}"
    if obstacle:
        raise ConfigError(f"workers.tensor_parallel={size} does not work with {model.config.model_type}: {obstacle}")


def prepare(network: nn.Module, model: nn.Module) -> None:
    """Let AutoTP find the plan of `model` (from Hugging Face) at the network around it."""
    network.config = model.config
    for parameter in model.parameters():
        if not parameter.requires_grad:  # AutoTP would add up the ranks' gradients of it, and there are none
            parameter._ds_grad_allreduce_registered = True


def n_numbers(parameter: nn.Parameter) -> int:
    """Number of numbers in a parameter, those of other ranks included."""
    if _cut_along(parameter) is None:
        return int(getattr(parameter, "ds_numel", parameter.numel()))  # ds_numel: of a parameter that ZeRO-3 spreads
    return int(torch.Size(_layout(parameter)["original_shape"]).numel())


def joined(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The whole of which `part` [shape of the parameter on this rank] is this rank's. Ranks must call together."""
    dim = _cut_along(parameter)
    if dim is None:
        return part
    sizes, group = _layout(parameter)["partition_sizes"], _group()
    parts = [part.new_empty([*part.shape[:dim], max(sizes), *part.shape[dim + 1 :]]) for _ in sizes]
    padded = torch.zeros_like(parts[0])  # parts need not be of one size, and all-gather wants them to be
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The length of the gradient of the whole model, a scalar, from the `.grad` that each rank has of its parts."""
    learned = [parameter for parameter in parameters if parameter.grad is not None]
    cut = [parameter.grad for parameter in learned if _cut_along(parameter) is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in learned if _cut_along(parameter) is None])
    if not cut:
        return norm
    square = torch.nn.utils.get_total_norm(cut).square()
    torch.distributed.all_reduce(square, group=_group())
    return (norm.square() + square).sqrt()


def _cut_along(parameter: nn.Parameter) -> int | None:
    """The dimension along which AutoTP has cut a parameter; None: every rank has all of it."""
    dim: int | None = _layout(parameter).get("partition_dim")
    return dim


def _layout(parameter: nn.Parameter) -> dict[str, Any]:
    """AutoTP's notes at a parameter, for checkpoints of its own."""
    layout: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return layout


def _group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()
