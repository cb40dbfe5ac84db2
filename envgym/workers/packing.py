"""Rows end to end in one sequence, instead of padded to the longest: the models that take them, and their arguments."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import nn

from envgym.errors import ConfigError

from .attention import takes_ends


def packed_inputs(token_ids: torch.Tensor, lengths: torch.Tensor, config: Any) -> dict[str, Any]:
    """Arguments of a transformers model with this config for rows of `lengths` [B] in `token_ids` [B, T], padded on the
    right: one sequence of all tokens, with positions that restart at each row.

    `sdpa`, `eager` and `flex_attention` derive the mask that separates rows from the positions (`masking_utils`), if
    they get no mask and no cache; flash kernels take the rows' ends. A model whose tokens have a time, a height and a
    width as positions takes the position in the row before them, which alone separates packed rows; at tokens of text
    all four are equal.
    """
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    valid = positions < lengths[:, None]
    has_axes = "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {})
    ends = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    return {
        "input_ids": token_ids[valid][None],
        "position_ids": positions[valid].expand(4, 1, -1) if has_axes else positions[valid][None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packs(setting: bool | Literal["auto"], model: nn.Module) -> bool:
    """True if `model` (from Hugging Face) gets its rows packed: if set to true, or for `auto` with attention that takes
    the ends of rows.

    Raises `ConfigError` where packing is set to true and the model cannot separate packed rows.
    """
    if setting is False:
        return False
    obstacle = _obstacle(model)
    if setting == "auto":
        return not obstacle and takes_ends(model.config._attn_implementation)
    if obstacle:
        raise ConfigError(f"workers.packing=true does not work with {model.config.model_type}: {obstacle}")
    return True


def _obstacle(model: nn.Module) -> str:
    """The reason why rows of this model cannot be packed, or an empty string."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    unsupported = sorted(kinds - {"full_attention", "sliding_attention"})
    if unsupported or getattr(model, "_is_stateful", False):
        return f"its layers of {unsupported[0] if unsupported else 'state'} would carry one sequence over into the next"
    # Transformers' own attention interface separates rows; other attention code need not.
    if not model._supports_flash_attn or "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return "its attention does not take the ends of sequences"
    return ""
