"""Rows that begin with the same tokens, computed once: the episodes of a group repeat their prompt, turns that fork and
the two sides of a preference pair their history.

All layers but attention process tokens separately, so they get every distinct prefix's last token once, in one flat
sequence. In attention, each row's new tokens see the row's whole path, gathered from the flat sequence; rows of like
lengths go through the model's own attention function together, with the model's own rule of what a token sees (causal,
windows, chunks), evaluated at positions in the row. So outputs are those of plain rows, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from envgym.types import Row
    from envgym.types.episodes import IntArray

MIN_SHARED = 0.1
"""Share of the tokens that must repeat for rows to be computed as shared prefixes: with less, plain rows are faster."""

MAX_PADDING = 2**14
"""Pairs of query and key that may be padding in a call of attention: computing them costs less than another call."""


def sort_by_prefix(rows: Sequence[IntArray]) -> list[tuple[int, int]]:
    """(index, shared) per row, in an order in which rows that share a prefix are neighbours: `shared` is the number of
    tokens that the row shares with the row before it, or with any earlier one."""
    order = sorted(range(len(rows)), key=lambda index: np.ascontiguousarray(rows[index], np.int64).tobytes())
    shared = [0] * bool(order) + [_common_prefix(rows[a], rows[b]) for a, b in pairwise(order)]
    return list(zip(order, shared, strict=True))


def _common_prefix(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:length]) != np.asarray(b[:length]))
    return int(differ[0]) if len(differ) else length


def n_distinct(samples: Sequence[Row]) -> int:
    """Number of distinct prefixes of the samples' rows: the tokens that are computed."""
    rows = [sample.token_ids for sample in samples]
    if len(rows) == 1:
        return len(rows[0])
    return sum(map(len, rows)) - sum(shared for _, shared in sort_by_prefix(rows))


def shared_share(samples: Sequence[Row]) -> float:
    """Share of the samples' tokens that repeat a prefix of another sample."""
    return 1 - n_distinct(samples) / max(1, sum([len(sample.token_ids) for sample in samples]))


@dataclass(frozen=True, slots=True)
class RowBucket:
    """The new tokens of n rows of like lengths, which follow each other in the flat sequence.

    queries    [n, Q] int64, their positions in the flat sequence; padding repeats the last one
    depths     [n, Q] int64, their positions in the row, padded likewise
    path       [n, K] int64, the positions of the row's tokens in the flat sequence, padded likewise
    new        [n, Q] bool, False at padding
    is_full    whether nothing is padding
    """

    queries: torch.Tensor
    depths: torch.Tensor
    path: torch.Tensor
    new: torch.Tensor
    is_full: bool


class SharedPrefixes:
    """The layout of a micro-batch's rows as one flat sequence of N distinct prefixes.

    token_ids  [N] int64
    positions  [N] int64, each token's position in its rows
    index      [B, T] int64, the position in the flat sequence of each row's tokens; 0 at padding
    """

    def __init__(self, samples: Sequence[Row], device: torch.device) -> None:
        import torch

        rows = [np.asarray(sample.token_ids) for sample in samples]
        order = sort_by_prefix(rows)
        buckets = _buckets([(row, shared, len(rows[row])) for row, shared in order])
        n_tokens, starts = 0, {}
        for row, shared, length in chain.from_iterable(buckets):
            starts[row] = n_tokens
            n_tokens += length - shared
        index = np.zeros((len(rows), max(map(len, rows))), np.int64)
        path = index[0, :0]
        for row, shared in order:
            new = starts.get(row, 0) + np.arange(len(rows[row]) - shared)
            path = index[row, : len(rows[row])] = np.concatenate([path[:shared], new])
        token_ids, positions = np.zeros(n_tokens, np.int64), np.zeros(n_tokens, np.int64)
        for tokens, path in zip(rows, index, strict=True):
            token_ids[path[: len(tokens)]] = tokens
            positions[path[: len(tokens)]] = np.arange(len(tokens))
        self.token_ids, self.positions, self.index = (
            torch.from_numpy(array).to(device) for array in (token_ids, positions, index)
        )
        self.buckets = [_bucket(members, index, device) for members in buckets]

    def __len__(self) -> int:
        return len(self.token_ids)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of transformers' models. The mask of ones keeps them from taking falling positions for packed
        rows."""
        ids, positions = self.token_ids[None], self.positions[None]
        return {"input_ids": ids, "position_ids": positions, "attention_mask": ids.new_ones(ids.shape)}

    def counts(self, valid: torch.Tensor) -> torch.Tensor:
        """[N] float32, the number of rows that have each token. valid [B, T] bool is False at padding."""
        return self.index[valid].bincount(minlength=len(self)).float()


Piece = tuple[int, int, int]
"""A row's index, the number of its tokens that are shared with an earlier one, and its length."""


def _buckets(rows: Sequence[Piece]) -> list[list[Piece]]:
    """Rows that have new tokens, in groups of like lengths, so that little is padding. Rows that share nothing are
    apart: their attention needs no mask."""

    def by_length(row: Piece) -> tuple[bool, int, int]:
        _, shared, length = row
        return shared > 0, shared - length, -length

    buckets: list[list[Piece]] = []
    with_new = sorted((row for row in rows if row[2] > row[1]), key=by_length)
    for _, group in groupby(with_new, lambda row: row[1] > 0):
        members: list[Piece] = []
        n_queries = n_keys = pairs = 0
        for row in group:
            _, shared, length = row
            n_keys, pairs = max(n_keys, length), pairs + (length - shared) * length
            padding = (len(members) + 1) * n_queries * n_keys - pairs
            if not members or padding > max(MAX_PADDING, pairs // 8):
                members = []
                buckets.append(members)
                n_queries, n_keys, pairs = length - shared, length, (length - shared) * length
            members.append(row)
    return buckets


def _bucket(rows: Sequence[Piece], paths: IntArray, device: torch.device) -> RowBucket:
    """The bucket of some rows. paths [B, T]: the positions of all rows' tokens in the flat sequence."""
    import torch

    numbers = np.array(rows)
    row_paths, shared, lengths = paths[numbers[:, 0]], numbers[:, 1:2], numbers[:, 2:]
    new = np.arange((lengths - shared).max()) < lengths - shared
    depths = np.minimum(shared + np.arange(new.shape[1]), lengths - 1)
    steps = np.minimum(np.arange(lengths.max()), lengths - 1)
    arrays = np.take_along_axis(row_paths, depths, 1), depths, np.take_along_axis(row_paths, steps, 1), new
    queries, positions, path, is_new = (torch.from_numpy(array).to(device) for array in arrays)
    return RowBucket(queries, positions, path, is_new, is_full=bool(new.all()))
