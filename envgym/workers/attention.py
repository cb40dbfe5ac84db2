"""Two kinds of attention that transformers' models can name: torch's kernel for rows of different lengths, and that
over rows that begin alike, whose common tokens are computed once.

The kernel is called once a layer with all rows of a micro-batch end to end: packed ones, padded ones, and the new
tokens of rows that share prefixes with their whole paths as keys. It takes the rows' ends, so no mask is made, and
neither compiles nor plans anything for a shape it has not seen; cuDNN, which `sdpa` takes on a Hopper GPU, does so for
every new one.

`SharedPrefixes` need the model's own attention function, called with a row's new tokens as queries and the row's whole
path as keys. A model of transformers makes its attention mask by one registered function and hands it, layer by layer,
to another. Here the first returns a `PathMask` in the place of a mask, which the second understands. So no model is
patched, and what a model does to its mask in between (checkpointing, a choice per layer) stays as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from .micro_batches import RowBucket, SharedPrefixes

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


Attention = Callable[..., tuple[torch.Tensor, Any]]

_active: SharedPrefixes | None = None
"""The layout of the forward pass that is running, for which a `PathMask` is made."""


_installed: set[str] = set()
"""Kinds of attention that understand a `PathMask`, by transformers' names."""


@contextmanager
def attention_over(prefixes: SharedPrefixes) -> Iterator[None]:
    """Let models that `install` knows attend within `prefixes`, whose flat sequence they get as one row."""
    global _active
    _active = prefixes
    try:
        yield
    finally:
        _active = None


class PathMask:
    """The tokens that each token of a layout sees.

    sees  (batch, head, query, key) -> True where a query sees a key: transformers' rule, for positions in a row
    kind  the implementation of attention, by transformers' name
    dtype that of the hidden states
    """

    def __init__(
        self, prefixes: SharedPrefixes, sees: Callable[..., torch.Tensor], kind: str, dtype: torch.dtype
    ) -> None:
        self.buckets = prefixes.buckets
        self.by_ends = takes_ends(kind)
        if self.by_ends:
            self.path, self.ends = _path_and_ends(prefixes.buckets)
        else:
            self.masks = [_mask(bucket, sees, kind, dtype) for bucket in prefixes.buckets]

    def attend(
        self, attention: Attention, module: nn.Module, states: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The output [1, N, heads, width] of `attention` for queries, keys and values [1, heads, N, width]."""
        query, key, value = (_Gather(state) for state in states)
        if self.by_ends:
            rows = (states[0], key(self.path), value(self.path))
            return attention(module, *rows, None, *args, **kwargs | self.ends)[0]
        outputs = []
        for bucket, mask in zip(self.buckets, self.masks, strict=True):
            rows = (query(bucket.queries), key(bucket.path), value(bucket.path))
            output = attention(module, *rows, mask, *args, **kwargs)[0]
            outputs.append(output.flatten(0, 1) if bucket.is_full else output[bucket.new])
        return torch.cat(outputs)[None]


def _mask(bucket: RowBucket, sees: Callable[..., torch.Tensor], kind: str, dtype: torch.dtype) -> torch.Tensor | None:
    """[n, 1, Q, K] bool, or numbers to add for `eager`; None where `sdpa` needs none: for whole rows, each token of
    which sees all before. Arguments as in `PathMask`."""
    queries, keys = bucket.depths[:, :, None], torch.arange(bucket.path.shape[1], device=bucket.path.device)
    zero = queries.new_zeros(())
    mask = sees(zero, zero, queries, keys).expand(-1, -1, len(keys))
    if kind == "sdpa" and not bucket.depths[:, 0].any() and torch.equal(mask, keys <= queries):
        return None
    if kind == "eager":
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return mask[:, None]


def _path_and_ends(buckets: Sequence[RowBucket]) -> tuple[torch.Tensor, dict[str, Any]]:
    """For kernels that take the ends of rows: the paths of all rows end to end, [1, tokens], and the ends. With fewer
    queries than keys, the last query sees the last key. Tested with a stand-in for the kernel."""
    lengths = [bucket.depths.amax(1) + 1 for bucket in buckets]
    paths = [
        bucket.path[torch.arange(bucket.path.shape[1], device=bucket.path.device) < length[:, None]]
        for bucket, length in zip(buckets, lengths, strict=True)
    ]
    n_new, n_keys = torch.cat([bucket.new.sum(1) for bucket in buckets]), torch.cat(lengths)
    ends = {
        "cu_seq_lens_q": nn.functional.pad(n_new.cumsum(0, dtype=torch.int32), (1, 0)),
        "cu_seq_lens_k": nn.functional.pad(n_keys.cumsum(0, dtype=torch.int32), (1, 0)),
        "max_length_q": int(n_new.max()),
        "max_length_k": int(n_keys.max()),
    }
    return torch.cat(paths)[None], ends


class _Gather:
    """Rows of the states [1, heads, N, width] of a flat sequence: [n, heads, M, width] for positions [n, M]."""

    def __init__(self, states: torch.Tensor) -> None:
        _, self.heads, _, self.width = states.shape
        self.flat = states[0].transpose(0, 1).flatten(1)

    def __call__(self, index: torch.Tensor) -> torch.Tensor:
        return gather(self.flat, index).unflatten(-1, (self.heads, self.width)).transpose(1, 2)


def gather(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`flat[index]`. The gradient of an embedding is the fastest sum over repeated positions that torch has."""
    return nn.functional.embedding(index, flat)


def install(model: nn.Module) -> None:
    """Let attention of `model`'s kind understand `PathMask`, for the whole process; other calls are as before."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = model.config._attn_implementation
    if kind in _installed:
        return
    _installed.add(kind)
    mask, registered = ALL_MASK_ATTENTION_FUNCTIONS[kind], ALL_ATTENTION_FUNCTIONS.get(kind, None)

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        attention = registered or sys.modules[type(module).__module__].eager_attention_forward
        if isinstance(attention_mask, PathMask):
            return attention_mask.attend(attention, module, (query, key, value), *args, **kwargs), None
        outputs: tuple[torch.Tensor, Any] = attention(module, query, key, value, attention_mask, *args, **kwargs)
        return outputs

    def create_mask(*, mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> Any:
        if _active is not None:
            return PathMask(_active, mask_function, kind, kwargs["dtype"])
        return mask(mask_function=mask_function, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(kind, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(kind, create_mask)
