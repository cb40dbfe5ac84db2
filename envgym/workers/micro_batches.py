"""Layout of samples: cut into micro-batches of even cost, the same number on every rank.

Padded to the longest of its rows, a micro-batch of B rows costs B x Tmax tokens; sorting by length first keeps that
close to the true number of tokens. Packed end to end, it costs no more than its tokens, and rows of any lengths go
together; but attention must then know where rows end. Flash kernels do; elsewhere the mask for it was measured 3 to 5
times slower on a CPU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
    samples: Sequence[TrainSample], tokens_per_microbatch: int, n_ranks: int, *, packed: bool = False
) -> list[list[MicroBatch]]:
    """Cut samples into micro-batches: `result[rank][k]` is a list of samples.

    Samples of one unit stay together. A micro-batch costs (see `cost`) at most `tokens_per_microbatch`, or as much as
    the costliest unit where that is more. Every rank gets the same number of micro-batches (ZeRO 2 and 3 need as many
    collectives from each); copies of a small unit with zero weight fill up. There are as few as the budget allows, or
    a few more where whole units cannot be shared out evenly otherwise (the fullest costs at most `SLACK` times the
    mean, or times the costliest unit), or where more of them need less padding (see `WORTH`). The result depends on
    nothing but the arguments.
    """
    units = _units(samples)
    if not units:
        return [[] for _ in range(n_ranks)]
    units.sort(key=_longest, reverse=True)  # stable, so equal lengths keep their order
    shapes = [_Shape(len(unit), _longest(unit), cost(unit, packed=True)) for unit in units]
    shares = _fewest(shapes, tokens_per_microbatch, n_ranks, packed)
    cheapest = min(units, key=lambda unit: cost(unit, packed=packed))
    batches = [
        [sample for index in share for sample in units[index]] if share else padding_samples(cheapest)
        for share in shares
    ]
    return _deal(batches, n_ranks, packed)


def cost(batch: MicroBatch, *, packed: bool) -> int:
    """Cost of a micro-batch: its tokens, or padded, the samples times the longest of them."""
    return sum(len(sample) for sample in batch) if packed else len(batch) * _longest(batch)


def padding_samples(unit: Unit) -> Unit:
    """A copy of a unit that adds nothing: zero weights, no sampled log-probabilities."""
    return [
        replace(s, loss_weights=np.zeros_like(s.loss_weights), old_logprobs=np.full_like(s.old_logprobs, np.nan))
        for s in unit
    ]


def is_silent(batch: Sequence[TrainSample]) -> bool:
    """The micro-batch only fills up."""
    return not any(sample.loss_weights.any() for sample in batch)


def _units(samples: Sequence[TrainSample]) -> list[Unit]:
    units: dict[int, Unit] = {}
    for sample in samples:
        units.setdefault(sample.batch_unit, []).append(sample)
    return list(units.values())


def _longest(samples: Sequence[TrainSample]) -> int:
    return max(len(sample) for sample in samples)


@dataclass(frozen=True, slots=True)
class _Shape:
    """All that the cost of a unit depends on."""

    samples: int
    longest: int
    tokens: int


Share = list[int]
"""Indexes of units that go into one micro-batch."""


def _fewest(shapes: Sequence[_Shape], budget: int, n_ranks: int, packed: bool) -> list[Share]:
    """As few micro-batches as fit, the same number for each rank; if padded, a few more where that saves padding. An
    empty one is to be filled up."""
    unit_costs = [_cost(shapes, [index], packed) for index in range(len(shapes))]
    largest, filler = max(unit_costs), min(unit_costs)
    split = _packed if packed else _padded

    @cache
    def shares(per_rank: int) -> list[Share]:
        units = split(shapes, per_rank * n_ranks)
        return units + [[]] * (-len(units) % n_ranks)

    def costs(per_rank: int) -> list[int]:
        return [_cost(shapes, share, packed) if share else filler for share in shares(per_rank)]

    def fits(per_rank: int) -> bool:
        each = costs(per_rank)
        return max(each) <= min(max(budget, largest), SLACK * max(sum(each) / len(each), largest))

    tokens = sum(shape.tokens for shape in shapes)
    most = -(-len(shapes) // n_ranks)  # one unit in each always fits
    best = fewest = _smallest_fitting(-(-tokens // (max(budget, largest) * n_ranks)), most, fits)
    if packed:
        return shares(fewest)

    def spent(per_rank: int) -> float:
        return sum(costs(per_rank)) / n_ranks + per_rank * WORTH * budget

    for more in range(fewest + 1, most + 1):
        if tokens / n_ranks + more * WORTH * budget >= spent(best):  # even without any padding
            break
        if fits(more) and spent(more) < spent(best):
            best = more
    return shares(best)


def _smallest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number that fits, from `low` up to `high`, which always does: they are tried in growing steps, then
    what was stepped over is halved. (A larger number need not fit where a smaller one does, so the smallest of all may
    be missed.)"""
    failed, number = low - 1, low
    while number < high and not fits(number):
        failed, number = number, min(high, number + max(1, number // 4))
    while number - failed > 1:
        middle = (failed + number) // 2
        if fits(middle):
            number = middle
        else:
            failed = middle
    return number


def _cost(shapes: Sequence[_Shape], share: Share, packed: bool) -> int:
    if packed:
        return sum(shapes[index].tokens for index in share)
    return sum(shapes[index].samples for index in share) * max(shapes[index].longest for index in share)


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
    low, high = 1, sum(shape.samples for shape in shapes) * shapes[0].longest
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
    start, samples = 0, 0
    for index, shape in enumerate(shapes):
        if index > start and (samples + shape.samples) * shapes[start].longest > budget:
            ranges.append((start, index))
            start, samples = index, 0
        samples += shape.samples
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


def pad(samples: Sequence[TrainSample], device: torch.device, length: int | None = None) -> RowBatch:
    """Pad samples of one objective on the right into tensors [B, T]; T is `length` or the longest sample's.

    Padding is 0 everywhere but in the log-probabilities as sampled, where it is NaN.
    """
    import torch

    length = length or _longest(samples)

    def stack(arrays: Sequence[NDArray[Any]], fill: float, dtype: type) -> torch.Tensor:
        out: NDArray[Any] = np.full((len(samples), length, *arrays[0].shape[1:]), fill, dtype)
        for line, array in zip(out, arrays, strict=True):
            line[: len(array)] = array
        return torch.from_numpy(out).to(device)

    return RowBatch(
        objective=samples[0].objective,
        token_ids=stack([sample.token_ids for sample in samples], 0, np.int64),
        loss_weights=stack([sample.loss_weights for sample in samples], 0, np.float32),
        old_logprobs=stack([sample.old_logprobs for sample in samples], np.nan, np.float32),
        arrays={name: stack([s.arrays[name] for s in samples], 0, np.float32) for name in samples[0].arrays},
        episodes=torch.tensor([sample.episode for sample in samples], device=device),
        units=torch.tensor([sample.batch_unit for sample in samples], device=device),
    )


def network_inputs(
    samples: Sequence[TrainSample], batches: Sequence[RowBatch], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The network's arguments for a micro-batch, whose samples, in order, are padded to one length in `batches`: token
    ids [B, T], lengths [B], the tokens that count or were sampled [B, T] bool, and temperatures [B, T]."""
    import torch

    token_ids, weights, old = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("token_ids", "loss_weights", "old_logprobs")
    )
    scales = np.ones(tuple(token_ids.shape), np.float32)
    for scale, sample in zip(scales, samples, strict=True):
        if sample.temperatures is not None:
            scale[: len(sample.temperatures)] = sample.temperatures
    # Greedy sampling (0) is from the unscaled distribution as far as learning is concerned.
    scales[scales == 0] = 1.0
    lengths = torch.tensor([len(sample) for sample in samples], device=device)
    return token_ids, lengths, (weights != 0) | old.isfinite(), torch.from_numpy(scales).to(device)
