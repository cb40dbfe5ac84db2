"""The parameters that learn, and their steps: frozen names, Muon, and a moving average of the weights.

Muon is by K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): momentum, orthogonalised
by a Newton-Schulz iteration, for the matrices inside the layers; AdamW for embeddings, heads, norms and biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from envgym.errors import ConfigError

from . import tensor_parallel, zero

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

ADAM_EPS = 1e-8
"""AdamW's epsilon in torch and DeepSpeed; DeepSpeed's Muon has another."""


def freeze(model: nn.Module, patterns: Sequence[str], *, strict: bool) -> None:
    """Freeze the parameters in whose Hugging Face name one of the regular expressions is found.

    A tied head goes by both of its names: it is one tensor with the embeddings. Raises `ConfigError` where nothing
    is left to train and, if `strict`, where a pattern is found nowhere.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if re.search(pattern, name)]
        if strict and not found:
            examples = f"{named[0][0]} and {named[-1][0]}"
            raise ConfigError(f"learner.freeze: {pattern!r} is found in no name of a parameter (such as {examples})")
        for parameter in found:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"learner.freeze={list(patterns)} leaves nothing to train")


def mark_for_muon(model: nn.Module) -> None:
    """Set `use_muon` on every parameter of a Hugging Face model, where DeepSpeed looks for it.

    DeepSpeed's own marks go by names and take a scalar head, and embeddings of another name, for hidden matrices.
    """
    outside = {id(parameter) for parameter in model.parameters()} - {id(p) for p in model.base_model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is model.get_output_embeddings():
            outside |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() >= 2 and id(parameter) not in outside


def muon_optimizer(
    learner: LearnerConfig, device: torch.device, *, offloaded: bool
) -> Callable[[Sequence[nn.Parameter]], Any]:
    """A function that makes the optimizer of marked parameters, for `deepspeed.initialize`.

    Each group's `lr_scale` is what the step's learning rate is multiplied by.
    """

    def make(parameters: Sequence[nn.Parameter]) -> Any:
        shared: dict[str, Any] = {"weight_decay": learner.weight_decay, "lr": learner.lr, "lr_scale": 1.0}
        adam = {**shared, "use_muon": False, "betas": tuple(learner.betas), "eps": ADAM_EPS}
        matrices = {**shared, "use_muon": True, "momentum": learner.muon_momentum}
        if learner.muon_lr is not None:
            matrices |= {"lr": learner.muon_lr, "lr_scale": learner.muon_lr / learner.lr}
        for group in (matrices, adam):
            group["params"] = [parameter for parameter in parameters if parameter.use_muon == group["use_muon"]]
        adam_of: Any = torch.optim.AdamW
        if offloaded and device.type == "cuda":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam_of = DeepSpeedCPUAdam
        return zero.muon_library(device).MuonWithAuxAdam(
            [group for group in (matrices, adam) if group["params"]], adam_optimizer=adam_of
        )

    return make


class MovingAverage:
    """`average <- decay * average + (1 - decay) * weights` at every `update`, from the float32 weights as they are
    when it is made, in float32. Frozen parameters have none. It is kept on `device`.

    Each rank averages the part of each parameter that its optimizer steps: with ZeRO its share, without all of it. So
    it costs no communication before it is read, and 4 bytes a parameter over all ranks.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, device: torch.device) -> None:
        self.decay = decay
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._parts: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            weights, _ = zero.own_part(parameter)
            if weights is not None:
                self._parts[name] = weights.detach().to(device, torch.float32, copy=True)

    def move(self, device: torch.device) -> None:
        """Keep it on another device."""
        self._parts = {name: part.to(device) for name, part in self._parts.items()}

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
