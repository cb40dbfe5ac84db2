"""Attention over `SharedPrefixes`: the model's own attention function, called with a row's new tokens as queries and
the row's whole path as keys.

A model of transformers makes its attention mask by one registered function and hands it, layer by layer, to another.
Here the first returns a `PathMask` in the place of a mask, which the second understands. So no model is patched, and
what a model does to its mask in between (checkpointing, a choice per layer) stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .prefixes import RowBucket, SharedPrefixes
from .varlen_attention import takes_ends

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
