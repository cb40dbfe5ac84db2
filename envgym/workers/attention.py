"""Attention for rows of different lengths by torch's own kernel, under a name that transformers' models can be given.

The kernel is called once a layer with all rows of a micro-batch end to end: packed ones, padded ones, and the new
tokens of rows that share prefixes with their whole paths as keys. It takes the rows' ends, so no mask is made, and
neither compiles nor plans anything for a shape it has not seen; cuDNN, which `sdpa` takes on a Hopper GPU, does so for
every new one.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

VARLEN = "torch_varlen"
"""The name of this attention in a model's config."""
WIDTHS = range(8, 257, 8)
"""Numbers per head that FlashAttention's kernels are compiled for."""


def takes_ends(kind: str) -> bool:
    """True if an attention, by transformers' name, takes the ends of rows instead of a mask."""
    return "flash" in kind or kind == VARLEN


def runs_here(dtype: torch.dtype) -> bool:
    """True if this process's device has the kernel for this number format: an NVIDIA GPU from Ampere on, in 16 bits."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability() >= (8, 0)
    )


def not_covered(config: Any, model_class: Any) -> str:
    """Name a feature of a model that the kernel does not have, or an empty string: the one place that decides.

    config       Hugging Face's, of the whole model
    model_class  transformers' class; None for one that it does not know

    Sinks and other changes to the softmax show in that transformers has no `sdpa` for a model either. A model's class
    must hand its attention over to transformers' interface and must not need a mask beyond causality and a window.
    """
    text = config.get_text_config()
    takes = inspect.signature(varlen_attn).parameters
    kinds = set(getattr(text, "layer_types", None) or ())
    n_heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // n_heads
    widths = {getattr(text, name, None) or width for name in ("qk_head_dim", "v_head_dim", "global_head_dim")}
    has_windows = getattr(text, "sliding_window", None) and (not kinds or "sliding_attention" in kinds)
    table = {
        "a soft cap of attention": getattr(text, "attn_logit_softcapping", None),
        "layers other than full and sliding attention": kinds - {"full_attention", "sliding_attention"},
        "attention of its own": not (
            getattr(model_class, "_supports_attention_backend", False)
            and getattr(model_class, "_supports_flash_attn", False)
        ),
        "sinks, or another softmax": not getattr(model_class, "_supports_sdpa", False),
        "dropout of attention": getattr(text, "attention_dropout", 0) or getattr(text, "attn_pdrop", 0),
        "windows, which this torch's varlen_attn does not take": has_windows and "window_size" not in takes,
        "heads of different widths": widths != {width},
        "a head width that is no multiple of 8, or above 256": width not in WIDTHS,
    }
    return next((feature for feature, is_present in table.items() if is_present), "")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, N, heads, width] for query [B, heads, N, width] and key and value [B, key heads, M, width], and no weights.

    With the ends of rows (int32 [rows + 1], from 0), B is 1, and a row's last query sees its last key. Without, all
    rows of the batch are N long. `sliding_window`: the number of keys that a query sees, its own among them. Raises
    `ValueError` for what the kernel has not.
    """
    takes = inspect.signature(varlen_attn).parameters
    changes = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None or dropout or changes:
        raise ValueError(f"varlen_attn has no {' or '.join(changes) or ('mask' if not dropout else 'dropout')}")
    if cu_seq_lens_q is None:
        n_rows, max_length_q = query.shape[0], query.shape[2]
        max_length_k = max_length_q
        cu_seq_lens_q = torch.arange(n_rows + 1, dtype=torch.int32, device=query.device) * max_length_q
        cu_seq_lens_k = cu_seq_lens_q
    q, k, v = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in takes:
        options = {"window_size": (sliding_window - 1 if sliding_window else -1, 0)}
    if q.shape[1] != k.shape[1] and "enable_gqa" in takes:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
    if scaling is not None and "scale" in takes:
        options["scale"] = scaling
    elif scaling is not None:  # the kernel divides by the root of the width
        q = q * (scaling * q.shape[-1] ** 0.5)
    output = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **options)
    return output.unflatten(0, (query.shape[0], -1)), None


AttentionInterface.register(VARLEN, attend)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)
