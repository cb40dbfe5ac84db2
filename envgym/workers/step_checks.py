"""A check of what an optimizer step has done to the weights, on a sample of them.

A step may go nowhere without any sign of it: gradients, norms and log-probabilities look as usual while the optimizer
updates numbers that nobody reads. So after each step a few trained parameters, others each time, are compared with the
optimizer's.

Of an adapter, its own matrices are looked at; frozen weights, in 4 bits or not, never. Tied weights are one parameter.
A moving average follows the optimizer's weights, and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

import torch
from torch import nn

from envgym.errors import RunError

from . import zero

CHECKED_PARAMETERS = 8
"""Parameters that are checked after a step."""
SAMPLED_WEIGHTS = 16
"""Weights of a parameter that are looked at."""


class StepCheck:
    """Checks the next few of the trained parameters of `model` after each step."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [item for item in model.named_parameters() if item[1].requires_grad]
        self._turn: Iterator[tuple[str, nn.Parameter]] = cycle(parameters)
        self._count = min(CHECKED_PARAMETERS, len(parameters))

    def run(self) -> None:
        """Raise `RunError` for weights that are not the optimizer's."""
        for name, parameter in islice(self._turn, self._count):
            check_weights(name, parameter)


def check_weights(name: str, parameter: nn.Parameter) -> None:
    """Raise `RunError` if sampled weights of a parameter are not those of the optimizer, rounded to their format: then
    the optimizer updates numbers that neither the model nor the engine reads, and nothing is learned."""
    part, start = zero.optimizer_part(parameter)
    if part is None or not len(part):
        return
    weights = parameter.ds_tensor.data if hasattr(parameter, "ds_id") else parameter.data.reshape(-1)[start:]
    indices = torch.arange(SAMPLED_WEIGHTS, device=part.device) * (len(part) - 1) // (SAMPLED_WEIGHTS - 1)
    expected = part.detach()[indices].to(weights.device, weights.dtype)
    if not torch.equal(weights.reshape(-1)[indices.to(weights.device)], expected):
        raise RunError(
            f"after an optimizer step the weights of {name} are not those of the optimizer, so that nothing is "
            "learned: this is a bug of envgym or of this version of DeepSpeed; try another workers.zero_stage"
        )
