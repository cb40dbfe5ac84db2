"""Rows that begin with the same tokens, computed once: the episodes of a group repeat their prompt, turns that fork and
the two sides of a preference pair their history.

All layers but attention process tokens separately, so they get every distinct prefix's last token once, in one flat
sequence. In attention, each row's new tokens see the row's whole path, gathered from the flat sequence; rows of like
lengths go through the model's own attention function together, with the model's own rule of who sees whom (causal,
windows, chunks), evaluated at positions in the row. So outputs are those of plain rows, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from envgym.learner import IntArray, TrainSample

MIN_SHARED = 0.1
"""Share of the tokens that must repeat for rows to be computed as shared prefixes: with less, plain rows are faster."""


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


def n_distinct(samples: Sequence[TrainSample]) -> int:
    """Number of distinct prefixes of the samples' rows: the tokens that are computed."""
    return sum(map(len, samples)) - sum(shared for _, shared in sort_by_prefix([s.token_ids for s in samples]))


def shared_share(samples: Sequence[TrainSample]) -> float:
    """Share of the samples' tokens that repeat a prefix of another sample."""
    return 1 - n_distinct(samples) / max(1, sum(map(len, samples)))


@dataclass(frozen=True, slots=True)
class Bucket:
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

    def __init__(self, samples: Sequence[TrainSample], device: torch.device) -> None:
        import torch

        rows = [np.asarray(sample.token_ids) for sample in samples]
        order = sort_by_prefix(rows)
        starts, buckets = _buckets([(index, shared, len(rows[index])) for index, shared in order])
        index = np.zeros((len(rows), max(map(len, rows))), np.int64)
        path = index[0, :0]
        for row, shared in order:
            length = len(rows[row])
            new = starts[row] + np.arange(length - shared)
            path = index[row, :length] = np.concatenate([path[:shared], new])
        n_tokens = sum(len(rows[row]) - shared for row, shared in order)
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
        import torch

        ids, positions = self.token_ids[None], self.positions[None]
        return {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}

    def counts(self, valid: torch.Tensor) -> torch.Tensor:
        """[N] float32, the number of rows that have each token. valid [B, T] bool is False at padding."""
        return self.index[valid].bincount(minlength=len(self)).float()


Row = tuple[int, int, int]
"""A row's index, the number of its tokens that are shared with an earlier one, and its length."""


def _buckets(rows: Sequence[Row]) -> tuple[dict[int, int], list[list[Row]]]:
    """Rows in groups of like lengths: numbers of new tokens and of all tokens within a factor of two. Also the position
    of each row's first new token in the flat sequence, where groups follow each other."""

    def likeness(row: Row) -> tuple[int, int]:
        _, shared, length = row
        return (length - shared - 1).bit_length(), (length - 1).bit_length()

    starts = {index: 0 for index, _, _ in rows}
    buckets, position = [], 0
    with_new = sorted((row for row in rows if row[2] > row[1]), key=likeness)
    for _, members in groupby(with_new, likeness):
        buckets.append(list(members))
        for index, shared, length in buckets[-1]:
            starts[index] = position
            position += length - shared
    return starts, buckets


def _bucket(rows: Sequence[Row], paths: IntArray, device: torch.device) -> Bucket:
    """The bucket of some rows. paths [B, T]: the positions of all rows' tokens in the flat sequence."""
    import torch

    numbers = np.array(rows)
    own, shared, lengths = paths[numbers[:, 0]], numbers[:, 1:2], numbers[:, 2:]
    new = np.arange((lengths - shared).max()) < lengths - shared
    depths = np.minimum(shared + np.arange(new.shape[1]), lengths - 1)
    steps = np.minimum(np.arange(lengths.max()), lengths - 1)
    arrays = np.take_along_axis(own, depths, 1), depths, np.take_along_axis(own, steps, 1), new
    queries, positions, path, is_new = (torch.from_numpy(array).to(device) for array in arrays)
    return Bucket(queries, positions, path, is_new, is_full=bool(new.all()))
