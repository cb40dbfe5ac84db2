"""Fused layers of liger-kernel: RMSNorm, rotary positions and SwiGLU or GeGLU in one kernel each way, of the families
that it knows. Its losses stay off: the head computes ours (see `head`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

_ABSENT = object()


def can_fuse(model: nn.Module, device: torch.device) -> bool:
    """True if liger-kernel is installed, runs on this device and knows the family of `model` (from Hugging Face)."""
    if device.type != "cuda" or not (find_spec("liger_kernel") and find_spec("triton")):
        return False
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def fuse(model: nn.Module) -> Callable[[], None]:
    """Fuse the layers of `model` in place. Returns a function that undoes it.

    Liger changes the model's modules, and the function of rotary positions for all models of the family in this
    process. It would also change the classes of models that are made later: that is undone here.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    spaces = [vars(sys.modules[type(model).__module__]), *(vars(module) for module in model.modules())]
    copies = [dict(space) for space in spaces]
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    changes = [
        (space, name, old.get(name, _ABSENT))
        for space, old in zip(spaces, copies, strict=True)
        for name in space
        if space[name] is not old.get(name, _ABSENT)
    ]

    for space, name, value in changes:
        if isinstance(value, type):
            space[name] = value

    def undo() -> None:
        for space, name, value in changes:
            if value is _ABSENT:
                space.pop(name, None)
            else:
                space[name] = value

    return undo
