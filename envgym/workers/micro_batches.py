"""Layout of rows: cut into micro-batches of even cost, the same number on every rank.

Padded to the longest of its rows, a micro-batch of B rows costs B x Tmax tokens; sorting by length first keeps that
close to the true number of tokens. Packed end to end, it costs no more than its tokens, and rows of any lengths go
together; but attention must then know where rows end. Flash kernels do; elsewhere the mask for it was measured 3 to 5
times slower on a CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from envgym.learner import RowBatch, TrainSample

if TYPE_CHECKING:
    import torch

Unit = list[TrainSample]
MicroBatch = list[TrainSample]

SLACK = 1.05
"""Largest cost of the fullest micro-batch, as a multiple of the mean (or of the costliest unit, which nothing can
divide)."""

WORTH = 1 / 8
"""The share of a full micro-batch that one more must save of padding: each has costs of its own."""


def micro_batches(
    rows: Sequence[TrainSample], tokens_per_microbatch: int, n_ranks: int, *, packed: bool = False
) -> list[list[MicroBatch]]:
    """Cut rows into micro-batches: `result[rank][k]` is a list of rows.

    Rows of one unit stay together. A micro-batch costs (see `cost`) at most `tokens_per_microbatch`, or as much as the
    costliest unit where that is more. Every rank gets the same number of micro-batches (ZeRO 2 and 3 need as many
    collectives from each); copies of a small unit with zero weight fill up. There are as few as the budget allows, or
    a few more where whole units cannot be shared out evenly otherwise (the fullest costs at most `SLACK` times the
    mean, or times the costliest unit), or where more of them need less padding (see `WORTH`). The result depends on
    nothing but the arguments.
    """
    units = _units(rows)
    if not units:
        return [[] for _ in range(n_ranks)]
    units.sort(key=_longest, reverse=True)  # stable, so equal lengths keep their order
    shapes = [_Shape(len(unit), _longest(unit), cost(unit, packed=True)) for unit in units]
    shares = _fewest(shapes, tokens_per_microbatch, n_ranks, packed)
    cheapest = min(units, key=lambda unit: cost(unit, packed=packed))
    batches = [
        [row for index in share for row in units[index]] if share else padding_samples(cheapest) for share in shares
    ]
    return _deal(batches, n_ranks, packed)


def cost(batch: MicroBatch, *, packed: bool) -> int:
    """Cost of a micro-batch: its tokens, or padded, the rows times the longest of them."""
    return sum(len(row.token_ids) for row in batch) if packed else len(batch) * _longest(batch)


def padding_samples(unit: Unit) -> Unit:
    """A copy of a unit that adds nothing: zero weights, no sampled log-probabilities."""
    return [
        replace(row, loss_weights=np.zeros_like(row.loss_weights), old_logprobs=np.full_like(row.old_logprobs, np.nan))
        for row in unit
    ]


def is_silent(batch: MicroBatch) -> bool:
    """The micro-batch only fills up."""
    return not any(row.loss_weights.any() for row in batch)


def _units(rows: Sequence[TrainSample]) -> list[Unit]:
    units: dict[int, Unit] = {}
    for row in rows:
        units.setdefault(row.batch_unit, []).append(row)
    return list(units.values())


def _longest(rows: Sequence[TrainSample]) -> int:
    return max(len(row.token_ids) for row in rows)


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that the cost of a unit depends on."""

    rows: int
    longest: int
    tokens: int


Share = list[int]
"""Indexes of units that go into one micro-batch."""


def _fewest(shapes: Sequence[_Shape], budget: int, n_ranks: int, packed: bool) -> list[Share]:
    """As few micro-batches as fit, by units: multiples of the ranks are tried from the least that the budget allows, in
    growing steps, then what was stepped over. One unit in each always fits. An empty one is to be filled up.

    (More need not fit where fewer do, so the fewest of all may be missed.)
    """
    whole = max(_cost(shapes, [index], packed) for index in range(len(shapes)))
    filler = min(_cost(shapes, [index], packed) for index in range(len(shapes)))
    split = _packed if packed else _padded

    def shared_out(n: int) -> list[Share]:
        shares = split(shapes, n)
        return shares + [[]] * (-len(shares) % n_ranks)

    def fits(shares: list[Share]) -> bool:
        costs = [_cost(shapes, share, packed) if share else filler for share in shares]
        return max(costs) <= min(max(budget, whole), SLACK * max(sum(costs) / len(costs), whole))

    tokens = sum(shape.tokens for shape in shapes)
    works = -(-tokens // (max(budget, whole) * n_ranks))
    most = -(-len(shapes) // n_ranks)
    failed = works - 1
    while not fits(found := shared_out(works * n_ranks)) and works < most:
        failed, works = works, min(most, works + max(1, works // 4))
    while works - failed > 1:
        middle = (failed + works) // 2
        fewer = shared_out(middle * n_ranks)
        if fits(fewer):
            works, found = middle, fewer
        else:
            failed = middle
    if packed:
        return found

    def spent(n: int, shares: list[Share]) -> float:
        return sum(_cost(shapes, share, packed) if share else filler for share in shares) / n_ranks + n * WORTH * budget

    least = spent(works, found)
    for more in range(works + 1, most + 1):
        if tokens / n_ranks + more * WORTH * budget >= least:  # even without any padding
            break
        shares = shared_out(more * n_ranks)
        if fits(shares) and spent(more, shares) < least:
            least, found = spent(more, shares), shares
    return found


def _cost(shapes: Sequence[_Shape], share: Share, packed: bool) -> int:
    if packed:
        return sum(shapes[index].tokens for index in share)
    return sum(shapes[index].rows for index in share) * max(shapes[index].longest for index in share)


def _packed(shapes: Sequence[_Shape], n: int) -> list[Share]:
    """Units in at most `n` shares of about as many tokens: the largest first, each to the share that has least."""
    shares: list[Share] = [[] for _ in range(min(n, len(shapes)))]
    loads = [(0, number) for number in range(len(shares))]  # a heap
    for index in sorted(range(len(shapes)), key=lambda index: -shapes[index].tokens):
        load, number = loads[0]
        shares[number].append(index)
        heapq.heapreplace(loads, (load + shapes[index].tokens, number))
    return shares


def _padded(shapes: Sequence[_Shape], n: int) -> list[Share]:
    """Units, sorted by falling length, in at most `n` shares of neighbours, the costliest of which costs least.

    The smallest budget is searched with which taking greedily gives so few: that is optimal for a sorted list, and
    monotone in the budget.
    """
    low, high = 1, sum(shape.rows for shape in shapes) * shapes[0].longest
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(shapes, middle)) <= n:
            high = middle
        else:
            low = middle + 1
    return [list(range(start, stop)) for start, stop in _greedy(shapes, high)]


def _greedy(shapes: Sequence[_Shape], budget: int) -> list[tuple[int, int]]:
    """Ranges `[start, stop)` of units, sorted by falling length, that cost at most `budget` each or hold one unit."""
    ranges = []
    start, rows = 0, 0
    for index, shape in enumerate(shapes):
        if index > start and (rows + shape.rows) * shapes[start].longest > budget:
            ranges.append((start, index))
            start, rows = index, 0
        rows += shape.rows
    ranges.append((start, len(shapes)))
    return ranges


def _deal(batches: list[MicroBatch], n_ranks: int, packed: bool) -> list[list[MicroBatch]]:
    """Give each rank as many micro-batches, the costliest first to the rank with least so far. So those that ranks
    work on at the same time cost about the same."""
    each = len(batches) // n_ranks
    ranks: list[list[MicroBatch]] = [[] for _ in range(n_ranks)]
    load = [0] * n_ranks
    for batch in sorted(batches, key=lambda batch: cost(batch, packed=packed), reverse=True):
        rank = min((r for r in range(n_ranks) if len(ranks[r]) < each), key=lambda r: (load[r], r))
        ranks[rank].append(batch)
        load[rank] += cost(batch, packed=packed)
    return ranks


def pad(rows: Sequence[TrainSample], device: torch.device, length: int | None = None) -> RowBatch:
    """Pad rows of one objective on the right into tensors [B, T]; T is `length` or the longest row's.

    Padding is 0 everywhere but in the log-probabilities as sampled, where it is NaN.
    """
    import torch

    n_rows = len(rows)
    length = length or _longest(rows)

    def stack(arrays: Sequence[NDArray[Any]], fill: float, dtype: type) -> torch.Tensor:
        out: NDArray[Any] = np.full((n_rows, length, *arrays[0].shape[1:]), fill, dtype)
        for line, array in zip(out, arrays, strict=True):
            line[: len(array)] = array
        return torch.from_numpy(out).to(device)

    return RowBatch(
        objective=rows[0].objective,
        token_ids=stack([row.token_ids for row in rows], 0, np.int64),
        loss_weights=stack([row.loss_weights for row in rows], 0, np.float32),
        old_logprobs=stack([row.old_logprobs for row in rows], np.nan, np.float32),
        arrays={name: stack([row.arrays[name] for row in rows], 0, np.float32) for name in rows[0].arrays},
        episodes=torch.tensor([row.episode for row in rows], device=device),
        units=torch.tensor([row.batch_unit for row in rows], device=device),
    )


def network_inputs(
    rows: Sequence[TrainSample], batches: Sequence[RowBatch], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The network's arguments for a micro-batch, whose rows, in order, are padded to one length in `batches`: token ids
    [B, T], lengths [B], the tokens that count or were sampled [B, T] bool, and temperatures [B, T]."""
    import torch

    token_ids, weights, old = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("token_ids", "loss_weights", "old_logprobs")
    )
    scales = np.ones(tuple(token_ids.shape), np.float32)
    for scale, row in zip(scales, rows, strict=True):
        if row.temperatures is not None:
            scale[: len(row.temperatures)] = row.temperatures
    # Greedy sampling (0) is from the unscaled distribution as far as learning is concerned.
    scales[scales == 0] = 1.0
    lengths = torch.tensor([len(row.token_ids) for row in rows], device=device)
    return token_ids, lengths, (weights != 0) | old.isfinite(), torch.from_numpy(scales).to(device)
