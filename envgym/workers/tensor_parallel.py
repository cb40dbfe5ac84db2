"""Tensor parallelism: the ranks of a group hold one part each of every large matrix, and have the same rows.

DeepSpeed's AutoTP splits the model when its engine is made, by transformers' plan for the architecture. This module
adds the check for models that it can split, and numbers that need all parts of a parameter. The embeddings and the
output layer are not split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError


def check(model: nn.Module, size: int) -> None:
    """Raise `ConfigError` for a model (from Hugging Face) that cannot be split into `size` parts."""
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
        obstacle = f"DeepSpeed cannot split layers the way transformers plans it ({', '.join(unknown)})"
    elif undivided := [f"{count} {kind}" for kind, count in counts.items() if count % size]:
        obstacle = f"it does not divide the {undivided[0]}"
    if obstacle:
        raise ConfigError(f"workers.tensor_parallel={size} does not work with {model.config.model_type}: {obstacle}")


def prepare(network: nn.Module, model: nn.Module) -> None:
    """Set what AutoTP reads on `network` and `model` (from Hugging Face): the config, and marks of frozen weights."""
    network.config = model.config
    for parameter in model.parameters():
        if not parameter.requires_grad:  # AutoTP would reduce its gradient, and it has none
            parameter._ds_grad_allreduce_registered = True


def n_numbers(parameter: nn.Parameter) -> int:
    """Number of numbers in a parameter, all ranks' parts included."""
    if _split_dim(parameter) is None:
        return int(getattr(parameter, "ds_numel", parameter.numel()))  # ds_numel: of a parameter partitioned by ZeRO 3
    return int(torch.Size(_layout(parameter)["original_shape"]).numel())


def gather_parts(parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The full tensor, from each rank's `part` [shape of the parameter on this rank]. A collective call."""
    dim = _split_dim(parameter)
    if dim is None:
        return part
    sizes, group = _layout(parameter)["partition_sizes"], _group()
    parts = [part.new_empty([*part.shape[:dim], max(sizes), *part.shape[dim + 1 :]]) for _ in sizes]
    padded = torch.zeros_like(parts[0])  # parts may differ in size, and all-gather needs equal sizes
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The norm of the whole model's gradient, a scalar, from the `.grad` of each rank's parts."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    grads_of_parts = [parameter.grad for parameter in trained if _split_dim(parameter) is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if _split_dim(parameter) is None])
    if not grads_of_parts:
        return norm
    square = torch.nn.utils.get_total_norm(grads_of_parts).square()
    torch.distributed.all_reduce(square, group=_group())
    return (norm.square() + square).sqrt()


def _split_dim(parameter: nn.Parameter) -> int | None:
    """The dimension along which AutoTP has split a parameter; None: every rank has all of it."""
    dim: int | None = _layout(parameter).get("partition_dim")
    return dim


def _layout(parameter: nn.Parameter) -> dict[str, Any]:
    """The layout that AutoTP stores on a parameter, for its own checkpoints."""
    layout: dict[str, Any] = getattr(parameter, "ds_autotp_universal_checkpoint_meta", {})
    return layout


def _group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()
