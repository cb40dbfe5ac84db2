"""Muon: which parameters it steers, and DeepSpeed's optimizer made with them.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): momentum, orthogonalised by a
Newton-Schulz iteration, for the matrices inside the layers; AdamW for embeddings, heads, norms and biases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from envgym.errors import ConfigError

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig

ADAM_EPS = 1e-8
"""AdamW's epsilon in torch and DeepSpeed; DeepSpeed's Muon has another."""


def mark(model: nn.Module) -> None:
    """Set `use_muon` on every parameter of a Hugging Face model, where DeepSpeed looks for it.

    DeepSpeed's own marks go by names and take a scalar head, and embeddings of another name, for hidden matrices.
    """
    outside = {id(parameter) for parameter in model.parameters()} - {id(p) for p in model.base_model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is model.get_output_embeddings():
            outside |= {id(parameter) for parameter in module.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() >= 2 and id(parameter) not in outside


def check(model: nn.Module, json: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where DeepSpeed's optimizer of this JSON cannot step what is marked."""
    stage = json["zero_optimization"]["stage"]
    experts = any(parameter.use_muon and parameter.dim() > 2 for parameter in model.parameters())  # in one parameter
    if experts and stage < 2 and json["bf16"]["enabled"]:
        raise ConfigError("learner.optimizer=muon with experts in bfloat16 needs workers.zero_stage=2 or 3")


def library(device: torch.device) -> Any:
    """DeepSpeed's module, which its ZeRO optimizers import too."""
    # It compiles the iteration, for each shape of a matrix: seconds that are never won back on a CPU.
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"} if device.type == "cpu" else {}):
        from deepspeed.runtime.zero.muon import muon_optimizer
    return muon_optimizer


def optimizer(
    learner: LearnerConfig, device: torch.device, *, offloaded: bool
) -> Callable[[Sequence[nn.Parameter]], Any]:
    """What makes the optimizer of marked parameters, for `deepspeed.initialize`.

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
        return library(device).MuonWithAuxAdam(
            [group for group in (matrices, adam) if group["params"]], adam_optimizer=adam_of
        )

    return make
