"""Rows end to end in one sequence, instead of padded to the longest: what a model needs to know of them, and which
models can be told."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import nn

from envgym.errors import ConfigError


def packed_inputs(token_ids: torch.Tensor, lengths: torch.Tensor, real: torch.Tensor) -> dict[str, Any]:
    """What transformers' models take for rows of `lengths` [B] out of `token_ids` [B, T], of which `real` [B, T] are
    tokens and not padding: one sequence of all tokens, with positions that begin again at each row.

    From those `sdpa`, `eager` and `flex_attention` make the mask that keeps rows apart (`masking_utils`), if they get
    no mask and no cache; flash kernels take the rows' ends.
    """
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    return {
        "input_ids": token_ids[real][None],
        "position_ids": positions[real][None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packs(setting: bool | Literal["auto"], model: nn.Module) -> bool:
    """Whether rows go packed through `model` (from Hugging Face): if set so, or by itself with flash kernels.

    Raises `ConfigError` where packing is asked for and the model would take its rows for one.
    """
    if setting is False:
        return False
    obstacle = _obstacle(model)
    if setting == "auto":
        return not obstacle and "flash" in model.config._attn_implementation  # as transformers tells them
    if obstacle:
        raise ConfigError(f"workers.packing=true does not work with {model.config.model_type}: {obstacle}")
    return True


def _obstacle(model: nn.Module) -> str:
    """Why rows of this model cannot be packed, or nothing."""
    backbone = model.base_model
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if others or getattr(model, "_is_stateful", False):
        return f"its layers of {others[0] if others else 'state'} would carry one row over into the next"
    # What goes by transformers' own attention interface keeps rows apart; others do as they please.
    if not model._supports_flash_attn or "position_ids" not in inspect.signature(backbone.forward).parameters:
        return "its attention cannot be told where rows end"
    return ""
