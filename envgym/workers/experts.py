"""Mixtures of experts: the loss that keeps their experts equally busy."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from envgym.errors import ConfigError

from .flops import n_experts


def has_experts(model: nn.Module) -> bool:
    """Whether `model` (from Hugging Face) has experts whose routers can be read."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    return "router_logits" in recorded and hasattr(_code(model), "load_balancing_loss_func")


def check_experts(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose experts cannot be balanced, or that has none."""
    if not has_experts(model):
        what = "none that transformers can balance" if n_experts(model.config.get_text_config()) else "none"
        raise ConfigError(
            f"learner.moe_aux_coef keeps the experts of a model equally busy; {model.config.model_type} has {what}: "
            "set it to 0"
        )


def balance_loss(model: nn.Module, router_logits: tuple[torch.Tensor, ...], real: torch.Tensor | None) -> torch.Tensor:
    """E * sum over experts of f_e P_e, a scalar: f_e is the share of tokens that go to expert e, P_e the mean
    probability that its router gives it; 1 per expert a token goes to where all are equally busy.

    Source: W. Fedus et al., "Switch Transformer" (2021), eq. 4 to 6, as transformers has it for the architecture (all
    layers in one mean). router_logits: [tokens, E] a layer; `real` says which tokens count, None: all.
    """
    config = model.config.get_text_config()
    loss: torch.Tensor = _code(model).load_balancing_loss_func(
        router_logits, n_experts(config), config.num_experts_per_tok, real
    )
    return loss


def _code(model: nn.Module) -> Any:
    """The module of transformers that the architecture is written in."""
    return sys.modules[type(model).__module__]
