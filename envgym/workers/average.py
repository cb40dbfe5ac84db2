"""A moving average of a model's weights, in float32, kept where the weights it follows are kept.

Each rank averages the part of each parameter that its optimizer steps: with ZeRO its share, without all of it. So it
costs no communication before it is read, and 4 bytes a parameter over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from . import tensor_parallel, zero


class MovingAverage:
    """`average <- decay * average + (1 - decay) * weights` at every `update`, from the float32 weights as they are
    when it is made. Frozen parameters have none. It is kept on `device`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, device: torch.device) -> None:
        self.decay = decay
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._parts: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            weights, _ = zero.own_part(parameter)
            if weights is not None:
                self._parts[name] = weights.detach().to(device, torch.float32, copy=True)

    def update(self) -> None:
        """Follow the weights after an optimizer step."""
        for name, parameter in self._parameters.items():
            weights, _ = zero.own_part(parameter)
            if weights is not None:
                average = self._parts[name]
                average.lerp_(weights.detach().to(average.device), 1 - self.decay)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """The average of one parameter in its own shape, float32, on `device`. Ranks must ask together."""
        parameter = self._parameters[name]
        _, start = zero.own_part(parameter)
        return tensor_parallel.joined(parameter, zero.joined(parameter, self._parts.get(name), start, device))

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's parts, for a checkpoint."""
        return self._parts

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state` of the same rank."""
        for name, part in self._parts.items():
            part.copy_(state[name])
