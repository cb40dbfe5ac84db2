"""Checks of what an optimizer step has done to the weights, on a sample of them.

A step may go nowhere without any sign of it: gradients, norms and log-probabilities look as usual while the optimizer
updates numbers that nobody reads, or none. So a few trained parameters, others at every step, are compared around it.

Of an adapter, its own matrices are looked at; frozen weights, in 4 bits or not, never. Tied weights are one parameter.
A moving average follows the optimizer's weights, and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from envgym.errors import RunError

from . import zero

CHECKED_PARAMETERS = 8
"""Parameters that are checked at every step."""
SAMPLED_WEIGHTS = 16
"""Weights of a parameter that are looked at."""
LEAST_GRADIENTS = 4
"""Sampled gradients that must be non-zero before a parameter counts as one that should move."""
LEAST_UPDATE = 0.01
"""The least update of AdamW, as a share of the learning rate, that some weight gets among those with a gradient above
its `eps`."""


@dataclass(frozen=True, slots=True)
class WeightSample:
    """Some weights of a parameter in the optimizer, and their gradients, before a step."""

    name: str
    parameter: nn.Parameter
    weights: torch.Tensor
    gradients: torch.Tensor


class StepChecks:
    """`begin` before an optimizer step, and `finish` after it if it was taken.

    `adam_eps`: AdamW's `eps`, whose steps must have moved the parameters with gradients; None for another optimizer.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, adam_eps: float | None) -> None:
        self._adam_eps = adam_eps
        self._turn: Iterator[tuple[str, nn.Parameter]] = cycle(parameters)
        self._count = min(CHECKED_PARAMETERS, len(parameters))
        self._checked: list[tuple[str, nn.Parameter]] = []
        self._samples: list[WeightSample] = []

    def begin(self) -> None:
        self._checked = list(islice(self._turn, self._count))
        self._samples = []
        if self._adam_eps is not None:
            samples = (sample_before(name, parameter) for name, parameter in self._checked)
            self._samples = [sample for sample in samples if sample is not None]

    def finish(self, lr: float, gradient_scale: float) -> None:
        """Raise `RunError` for weights that should have changed and did not. `gradient_scale`: the factor by which the
        optimizer's gradients were multiplied (clipping, a loss scale)."""
        if self._adam_eps is not None:
            for sample in self._samples:
                check_moved(sample, lr, gradient_scale, self._adam_eps)
        for name, parameter in self._checked:
            check_weights(name, parameter)


def sample_before(name: str, parameter: nn.Parameter) -> WeightSample | None:
    """None for a parameter that this rank's optimizer does not update, or whose gradient is far from its weights (with
    an offloaded optimizer)."""
    part, start = zero.optimizer_part(parameter)
    if part is None or not len(part):
        return None
    gradient = _gradient(parameter, part, start)
    if gradient is None:
        return None
    indices = _sampled_indices(part)
    return WeightSample(name, parameter, part.detach()[indices].clone(), gradient.detach()[indices].clone())


def _gradient(parameter: nn.Parameter, part: torch.Tensor, start: int) -> torch.Tensor | None:
    """The gradient of the optimizer's `part` of a parameter, flat, as DeepSpeed has it between backward and step."""
    if hasattr(parameter, "ds_id"):
        if part.device != parameter.ds_tensor.device:
            return None  # DeepSpeed would copy all of it
        gradient: Any = parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
    elif hasattr(parameter, "_hp_mapping"):
        gradient = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        if gradient is not None and gradient.numel() == parameter.numel():
            gradient = gradient.reshape(-1)[start:]
    else:
        gradient = parameter.grad
    return None if gradient is None else gradient.reshape(-1)[: len(part)].to(part.device)


def check_moved(sample: WeightSample, lr: float, gradient_scale: float, eps: float) -> None:
    """Raise `RunError` if no sampled weight moved, though enough had a gradient above AdamW's `eps`. Updates that the
    weights' own float32 could not hold are no fault."""
    with_gradient = (sample.gradients.float() * gradient_scale).abs() > eps
    precision = torch.finfo(torch.float32).eps * sample.weights[with_gradient].abs()
    if with_gradient.sum() < LEAST_GRADIENTS or bool((lr * LEAST_UPDATE <= precision).any()):
        return
    part, _ = zero.optimizer_part(sample.parameter)
    assert part is not None
    if torch.equal(part.detach()[_sampled_indices(part)][with_gradient], sample.weights[with_gradient]):
        raise RunError(
            f"an optimizer step did not move the weights of {sample.name}, which have a gradient: this is a bug of "
            "envgym or of this version of DeepSpeed; try another workers.zero_stage"
        )


def check_weights(name: str, parameter: nn.Parameter) -> None:
    """Raise `RunError` if sampled weights of a parameter are not those of the optimizer, rounded to their format: then
    the optimizer updates numbers that neither the model nor the engine reads, and nothing is learned."""
    part, start = zero.optimizer_part(parameter)
    if part is None or not len(part):
        return
    weights = parameter.ds_tensor.data if hasattr(parameter, "ds_id") else parameter.data.reshape(-1)[start:]
    indices = _sampled_indices(part)
    expected = part.detach()[indices].to(weights.device, weights.dtype)
    if not torch.equal(weights.reshape(-1)[indices.to(weights.device)], expected):
        raise RunError(
            f"after an optimizer step the weights of {name} are not those of the optimizer, so that nothing is "
            "learned: this is a bug of envgym or of this version of DeepSpeed; try another workers.zero_stage"
        )


def check_buffers(engine: Any) -> None:
    """Raise `RunError` if a trained parameter does not lie in the buffer that DeepSpeed updates."""
    optimizer = getattr(engine, "optimizer", None)
    buffers = getattr(optimizer, "bit16_groups_flat", None) or getattr(optimizer, "fp16_partitioned_groups_flat", None)
    if not buffers or any(buffer is None for buffer in buffers):
        return
    for name, parameter in engine.module.named_parameters():
        tensor = getattr(parameter, "ds_tensor", parameter)
        if parameter.requires_grad and tensor.numel() and not any(_contains(buffer, tensor) for buffer in buffers):
            raise RunError(
                f"{name} came back from the host outside of the buffer that the optimizer updates: this is a bug of "
                "envgym or of this version of DeepSpeed; set colocate=auto"
            )


def _contains(buffer: torch.Tensor, tensor: torch.Tensor) -> bool:
    start, address = int(buffer.data_ptr()), int(tensor.data_ptr())
    return start <= address < start + int(buffer.nbytes)


def _sampled_indices(part: torch.Tensor) -> torch.Tensor:
    return torch.arange(SAMPLED_WEIGHTS, device=part.device) * (len(part) - 1) // (SAMPLED_WEIGHTS - 1)
