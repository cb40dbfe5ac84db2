"""Attention over `SharedPrefixes`: the model's own attention function, called with a row's new tokens as queries and
the row's whole path as keys.

A model of transformers makes its attention mask by one registered function and hands it, layer by layer, to another.
Here the first returns a `PathMask` in the place of a mask, which the second understands. So no model is patched, and
what a model does to its mask in between (checkpointing, a choice per layer) stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .prefixes import Bucket, SharedPrefixes

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
    """

    def __init__(self, prefixes: SharedPrefixes, sees: Callable[..., torch.Tensor], kind: str) -> None:
        self.prefixes = prefixes
        self.kind = kind
        self.masks = [] if "flash" in kind else [self._mask(bucket, sees) for bucket in prefixes.buckets]

    def _mask(self, bucket: Bucket, sees: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """[n, 1, Q, K] bool, or None where `sdpa` needs none: for whole rows, each token of which sees all before."""
        queries, keys = bucket.depths[:, :, None], torch.arange(bucket.path.shape[1], device=bucket.path.device)
        zero = queries.new_zeros(())
        mask = sees(zero, zero, queries, keys).expand(-1, -1, len(keys))
        if self.kind == "sdpa" and not bucket.depths[:, 0].any() and torch.equal(mask, keys <= queries):
            return None
        return mask[:, None]

    def attend(
        self, attention: Attention, module: nn.Module, states: tuple[torch.Tensor, ...], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The output [1, N, heads, width] of `attention` for queries, keys and values [1, heads, N, width]."""
        query, key, value = (_Gather(state) for state in states)
        if "flash" in self.kind:
            return self._attend_by_ends(attention, module, states[0], key, value, *args, **kwargs)
        outputs = []
        for bucket, mask in zip(self.prefixes.buckets, self.masks, strict=True):
            if mask is not None and self.kind == "eager":
                mask = query.flat.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.flat.dtype).min)
            rows = (query(bucket.queries), key(bucket.path), value(bucket.path))
            output = attention(module, *rows, mask, *args, **kwargs)[0]
            outputs.append(output.flatten(0, 1) if bucket.is_full else output[bucket.new])
        return torch.cat(outputs)[None]

    def _attend_by_ends(
        self,
        attention: Attention,
        module: nn.Module,
        query: torch.Tensor,
        key: _Gather,
        value: _Gather,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`attend` for flash kernels, which take the ends of rows: with fewer queries than keys, the last query sees
        the last key. Tested with a stand-in for the kernel; not run on a GPU yet."""
        buckets = self.prefixes.buckets
        lengths = [bucket.depths.amax(1) + 1 for bucket in buckets]
        paths = [
            bucket.path[torch.arange(bucket.path.shape[1], device=query.device) < length[:, None]]
            for bucket, length in zip(buckets, lengths, strict=True)
        ]
        n_new, n_keys = torch.cat([bucket.new.sum(1) for bucket in buckets]), torch.cat(lengths)
        path = torch.cat(paths)[None]
        ends = {
            "cu_seq_lens_q": nn.functional.pad(n_new.cumsum(0, dtype=torch.int32), (1, 0)),
            "cu_seq_lens_k": nn.functional.pad(n_keys.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_length_q": int(n_new.max()),
            "max_length_k": int(n_keys.max()),
        }
        return attention(module, query, key(path), value(path), None, *args, **kwargs | ends)[0]


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
    mask = ALL_MASK_ATTENTION_FUNCTIONS[kind]
    if kind in _installed:
        return
    _installed.add(kind)
    registered = ALL_ATTENTION_FUNCTIONS.get(kind, None)

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
            return PathMask(_active, mask_function, kind)
        return mask(mask_function=mask_function, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(kind, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(kind, create_mask)
