"""Trained parameters and their optimizer: frozen names, Muon, and a moving average of the weights.

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
from envgym.models.vision import vision_pattern

from . import zero

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig


def freeze(model: nn.Module, patterns: Sequence[str], *, strict: bool) -> None:
    """Freeze the parameters with a Hugging Face name that matches one of the regular expressions.

    A tied head has two names: it is one tensor with the embeddings. Raises `ConfigError` if nothing is left to train
    and, if `strict`, for a pattern without a match.
    """
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matches = [parameter for name, parameter in parameters if re.search(pattern, name)]
        if strict and not matches:
            examples = f"{parameters[0][0]} and {parameters[-1][0]}"
            raise ConfigError(f"learner.freeze: {pattern!r} matches no parameter's name (such as {examples})")
        for parameter in matches:
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for _, parameter in parameters):
        raise ConfigError(f"learner.freeze={list(patterns)} leaves nothing to train")


def mark_vision(model: nn.Module, *, frozen: bool) -> None:
    """Set `of_vision` on the parameters of a Hugging Face model that texts do not reach: the vision tower and what
    connects it to the language model. `frozen`: they need neither gradients nor moments."""
    pattern = vision_pattern(model)
    for name, parameter in model.named_parameters():
        if re.fullmatch(pattern, name):
            parameter.of_vision = True
            parameter.requires_grad_(parameter.requires_grad and not frozen)  # an adapter has frozen it


def mark_for_muon(model: nn.Module) -> None:
    """Set `use_muon` on every parameter of a Hugging Face model, from where DeepSpeed reads it.

    DeepSpeed's own marks go by names, and count a scalar head and embeddings of other names as hidden matrices. The
    convolutions and position tables of a vision tower are no matrices; experts are one matrix each, in one tensor.
    """
    outer_ids = {id(parameter) for parameter in model.parameters()} - {id(p) for p in model.base_model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is model.get_output_embeddings():
            outer_ids |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 or (parameter.dim() == 3 and ".experts." in name)
        parameter.use_muon = is_matrix and id(parameter) not in outer_ids


def muon_optimizer(
    learner: LearnerConfig, device: torch.device, *, offloaded: bool
) -> Callable[[Sequence[nn.Parameter]], Any]:
    """A factory of the optimizer of marked parameters, for `deepspeed.initialize`.

    Each group's learning rate is the step's learning rate times the group's `lr_scale`.
    """

    def create(parameters: Sequence[nn.Parameter]) -> Any:
        common: dict[str, Any] = {"weight_decay": learner.weight_decay, "lr": learner.lr, "lr_scale": 1.0}
        adam = {**common, "use_muon": False, "betas": tuple(learner.betas), "eps": learner.eps}
        matrices = {**common, "use_muon": True, "momentum": learner.muon_momentum}
        if learner.muon_lr is not None:
            matrices |= {"lr": learner.muon_lr, "lr_scale": learner.muon_lr / learner.lr}
        for group in (matrices, adam):
            group["params"] = [parameter for parameter in parameters if parameter.use_muon == group["use_muon"]]
        adam_class: Any = torch.optim.AdamW
        if offloaded and device.type == "cuda":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            adam_class = DeepSpeedCPUAdam
        groups = zero.with_vision_apart([matrices, adam])
        return zero.muon_library(device).MuonWithAuxAdam(groups, adam_optimizer=adam_class)

    return create


class MovingAverage:
    """`average <- decay * average + (1 - decay) * weights` at every `update`, in float32 on `device`, starting from the
    current float32 weights. Frozen parameters have no average.

    Each rank averages the part of each parameter that its optimizer updates: with ZeRO its share, otherwise all of it.
    So updates need no communication, and all ranks together 4 bytes per parameter with ZeRO.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float, device: torch.device) -> None:
        self.decay = decay
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._parts: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            weights, _ = zero.optimizer_part(parameter)
            if weights is not None:
                self._parts[name] = weights.detach().to(device, torch.float32, copy=True)

    def move(self, device: torch.device) -> None:
        """Move the average to another device."""
        self._parts = {name: part.to(device) for name, part in self._parts.items()}

    def update(self) -> None:
        """Follow the weights after an optimizer step."""
        for name, parameter in self._parameters.items():
            weights, _ = zero.optimizer_part(parameter)
            if weights is not None:
                average = self._parts[name]
                average.lerp_(weights.detach().to(average.device), 1 - self.decay)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def full_tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """The average of one parameter in its own shape, float32, on `device`. A collective call."""
        parameter = self._parameters[name]
        _, start = zero.optimizer_part(parameter)
        part = zero.gather_full(parameter, self._parts.get(name), start, device)
        return zero.gather_parts(parameter, part)

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's parts, for a checkpoint."""
        return self._parts

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state` of the same rank."""
        for name, part in self._parts.items():
            part.copy_(state[name])
