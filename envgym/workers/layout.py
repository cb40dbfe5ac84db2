"""How rows are laid out: cut into padded micro-batches, the same number on every rank.

Padding is to the longest row of a micro-batch, so one of B rows costs B x Tmax tokens. Sorting by length first
keeps that close to the true number of tokens; packing rows end to end would waste nothing, but its block
attention mask was measured 3 to 5 times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from envgym.learner import LearnRow, RowBatch

if TYPE_CHECKING:
    import torch

Unit = list[LearnRow]
MicroBatch = list[LearnRow]


def micro_batches(rows: Sequence[LearnRow], tokens_per_microbatch: int, n_ranks: int) -> list[list[MicroBatch]]:
    """Cut rows into micro-batches: `result[rank][k]` is a list of rows.

    Rows of one unit stay together. A micro-batch costs at most `tokens_per_microbatch` padded tokens, unless a
    single unit is larger. Every rank gets the same number of micro-batches (ZeRO 2 and 3 need as many collectives
    from each), of about equal cost; copies of a small unit with zero weight fill up. The result depends on
    nothing but the arguments.
    """
    units = _units(rows)
    if not units:
        return [[] for _ in range(n_ranks)]
    units.sort(key=_longest, reverse=True)  # stable, so equal lengths keep their order
    shapes = [(len(unit), _longest(unit)) for unit in units]
    batches = [
        [row for unit in units[start:stop] for row in unit]
        for start, stop in _cut(shapes, tokens_per_microbatch, n_ranks)
    ]
    return _deal(batches, n_ranks, filler=silenced(units[-1]))


def padded_tokens(batch: MicroBatch) -> int:
    """What a micro-batch costs: rows times the longest of them."""
    return len(batch) * _longest(batch)


def silenced(unit: Unit) -> Unit:
    """A copy of a unit that adds nothing: zero weights, no sampled log-probabilities."""
    return [
        replace(row, weights=np.zeros_like(row.weights), old_logprobs=np.full_like(row.old_logprobs, np.nan))
        for row in unit
    ]


def is_silent(batch: MicroBatch) -> bool:
    """Whether a micro-batch only fills up."""
    return not any(row.weights.any() for row in batch)


def _units(rows: Sequence[LearnRow]) -> list[Unit]:
    units: dict[int, Unit] = {}
    for row in rows:
        units.setdefault(row.unit, []).append(row)
    return list(units.values())


def _longest(rows: Sequence[LearnRow]) -> int:
    return max(len(row.token_ids) for row in rows)


def _cut(shapes: Sequence[tuple[int, int]], budget: int, n_ranks: int) -> list[tuple[int, int]]:
    """Cut units (rows, longest), sorted by falling length, into ranges `[start, stop)` of even cost.

    The number of ranges is the smallest multiple of the ranks that the budget allows; within it, the smallest
    budget that still gives so few is searched, which evens them out. (Taking greedily from a sorted list is optimal
    and monotone in the budget, so bisection finds it.)
    """
    whole = _greedy(shapes, budget)
    allowed = -(-len(whole) // n_ranks) * n_ranks
    low, high = 1, budget  # `high` always gives at most `allowed` ranges
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(shapes, middle)) <= allowed:
            high = middle
        else:
            low = middle + 1
    return _greedy(shapes, high)


def _greedy(shapes: Sequence[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
    ranges = []
    start, n_rows = 0, 0
    for index, (unit_rows, _) in enumerate(shapes):
        longest = shapes[start][1]
        if index > start and (n_rows + unit_rows) * longest > budget:
            ranges.append((start, index))
            start, n_rows = index, 0
        n_rows += unit_rows
    ranges.append((start, len(shapes)))
    return ranges


def _deal(batches: list[MicroBatch], n_ranks: int, filler: MicroBatch) -> list[list[MicroBatch]]:
    """Give each rank the same number of micro-batches, the most expensive first to the rank with least so far."""
    each = -(-len(batches) // n_ranks)
    ranks: list[list[MicroBatch]] = [[] for _ in range(n_ranks)]
    cost = [0] * n_ranks
    for batch in sorted(batches, key=padded_tokens, reverse=True):
        rank = min((r for r in range(n_ranks) if len(ranks[r]) < each), key=lambda r: (cost[r], r))
        ranks[rank].append(batch)
        cost[rank] += padded_tokens(batch)
    for share in ranks:
        share.extend([filler] * (each - len(share)))
    return ranks


def pad(rows: Sequence[LearnRow], device: torch.device, length: int | None = None) -> RowBatch:
    """Pad rows of one objective on the right into tensors [B, T]; T is `length` or the longest row's.

    Padding is 0 everywhere but in the log-probabilities as sampled, where it is NaN.
    """
    import torch

    n_rows = len(rows)
    length = length or _longest(rows)

    def stack(arrays: Sequence[NDArray[Any]], fill: float, dtype: type) -> torch.Tensor:
        out: NDArray[Any] = np.full((n_rows, length), fill, dtype)
        for line, array in zip(out, arrays, strict=True):
            line[: len(array)] = array
        return torch.from_numpy(out).to(device)

    return RowBatch(
        objective=rows[0].objective,
        token_ids=stack([row.token_ids for row in rows], 0, np.int64),
        weights=stack([row.weights for row in rows], 0, np.float32),
        old_logprobs=stack([row.old_logprobs for row in rows], np.nan, np.float32),
        arrays={name: stack([row.arrays[name] for row in rows], 0, np.float32) for name in rows[0].arrays},
        episodes=torch.tensor([row.episode for row in rows], device=device),
    )
