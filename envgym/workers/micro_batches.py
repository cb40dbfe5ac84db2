"""Micro-batches: a split of samples into ones of similar cost, the same number on every rank, and the sum of their
metrics. Rows that begin with the same tokens (the episodes of a group, turns that fork, the two sides of a preference
pair) are computed once.

Padded to the longest of its rows, a micro-batch of B rows costs B x Tmax tokens; sorting by length first keeps that
close to the true number of tokens. Packed end to end, it costs no more than its tokens, and rows of any lengths fit
together; but attention must then know where rows end. Flash kernels do; elsewhere a mask is needed, which was measured
3 to 5 times slower on a CPU. Rows that repeat a prefix go together.

Of such rows, all layers but attention process tokens separately, so they get every distinct prefix's last token once,
in one flat sequence. In attention, each row's new tokens see the row's whole path, gathered from the flat sequence;
rows of like lengths go through the model's own attention function together, with the model's own rule of what a token
sees (causal, windows, chunks), evaluated at positions in the row. So outputs are those of plain rows, up to rounding.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from envgym.learner import MetricSums, RowBatch
from envgym.types import Row

if TYPE_CHECKING:
    import torch

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


Unit = list[Row]
MicroBatch = list[Row]
Layout = Literal["padded", "packed", "shared"]
"""Rows padded to the longest, end to end, or as `SharedPrefixes`."""

SLACK = 1.05
"""Maximum cost of a micro-batch, as a multiple of the mean (or of the costliest unit, which cannot be split)."""

MAX_SHARING = 8
"""Maximum tokens of a micro-batch with shared prefixes, as a multiple of the budget: each of them takes some memory."""

MIN_SAVING = 1 / 8
"""Padding that an extra micro-batch must save to be worth its overhead, as a fraction of the token budget."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Facts of a rank that has loaded its model.

    n_parameters     of the model, over all ranks
    n_trained        number of trained ones
    adapter          whether an adapter is trained instead of the weights
    vocabulary       number of token ids
    attention        its implementation, by transformers' name
    packed           whether rows go through the model end to end
    not_shared       the reason why prefixes that rows share are not computed once; empty if they are
    notes            what the model does without, each with the reason
    flops_per_token  (a, b): training on one token of a sequence of T tokens takes a + b T FLOPs
    peak_flops       FLOPs per second of the device; None if unknown (on a CPU)
    """

    n_parameters: int
    n_trained: int
    adapter: bool
    device: str
    dtype: str
    vocabulary: int
    attention: str
    packed: bool
    not_shared: str
    notes: tuple[str, ...]
    flops_per_token: tuple[float, float]
    peak_flops: float | None

    def layout_of(self, samples: Sequence[Row]) -> Layout:
        """The layout of these samples in the model; see `choose_layout`."""
        return choose_layout(samples, shares_prefixes=not self.not_shared, packed=self.packed)

    def flops(self, samples: Sequence[Row]) -> float:
        """FLOPs of training on `samples` once."""
        a, b = self.flops_per_token
        return sum(a * length + b * length**2 for length in (len(sample.token_ids) for sample in samples))


def choose_layout(samples: Sequence[Row], *, shares_prefixes: bool, packed: bool) -> Layout:
    """The layout of samples in a model: shared prefixes, if it supports them and they save enough; else packed or
    padded. Rows with images share none: other images have the same tokens."""
    if shares_prefixes and not has_images(samples) and shared_share(samples) >= MIN_SHARED:
        return "shared"
    return "packed" if packed else "padded"


def has_images(samples: Sequence[Row]) -> bool:
    """True if any row has an image."""
    return any(sample.images for sample in samples)


def micro_batches(
    samples: Sequence[Row], tokens_per_microbatch: int, n_ranks: int, *, layout: Layout = "padded"
) -> list[list[MicroBatch]]:
    """Split samples into micro-batches: `result[rank][k]` is a list of samples.

    Samples of one unit stay together. A micro-batch costs (see `cost`) at most `tokens_per_microbatch`, or the cost of
    the costliest unit if that is more. Every rank gets the same number of micro-batches (ZeRO 2 and 3 need the same
    collectives on every rank); copies of a small unit with zero weight are added as padding. There are as few as the
    budget allows, or a few more if units cannot be divided evenly otherwise (the maximum cost is `SLACK` times the
    mean, or times the costliest unit), or if that saves padding (see `MIN_SAVING`). The result is a pure function of
    the arguments.
    """
    units_by_key: dict[int, Unit] = {}
    for sample in samples:
        units_by_key.setdefault(sample.microbatch_key, []).append(sample)
    if not units_by_key:
        return [[] for _ in range(n_ranks)]
    units = list(units_by_key.values())
    if layout == "shared":
        units = _join_by_prefix(units, min(tokens_per_microbatch, -(-n_distinct(samples) // n_ranks)))
    units.sort(key=_longest, reverse=True)  # stable, so equal lengths keep their order
    tokens_in: Layout = "packed" if layout == "padded" else layout
    shapes = [_Shape(len(unit), _longest(unit), cost(unit, layout=tokens_in)) for unit in units]
    shares = _minimize_shares(shapes, tokens_per_microbatch, n_ranks, layout)
    cheapest = min(units, key=lambda unit: cost(unit, layout=layout))
    batches = [
        [sample for index in share for sample in units[index]] if share else padding_samples(cheapest)
        for share in shares
    ]
    return _deal_to_ranks(batches, n_ranks, layout)


def cost(batch: Sequence[Row], *, layout: Layout) -> int:
    """Cost of a micro-batch: the tokens that are computed, padding included; with shared prefixes at least an eighth of
    all tokens, whose keys and values each row has for itself."""
    if layout == "padded":
        return len(batch) * _longest(batch)
    tokens = sum([len(sample.token_ids) for sample in batch])
    return max(n_distinct(batch), tokens // MAX_SHARING) if layout == "shared" else tokens


def _join_by_prefix(units: Sequence[Unit], max_tokens: int) -> list[Unit]:
    """Units joined where at least half of a unit's first row begins another one's, up to a cost of `max_tokens`: what
    they share is then computed once, or once per `max_tokens`."""
    joined: list[Unit] = []
    distinct = tokens = 0
    for index, shared in sort_by_prefix([unit[0].token_ids for unit in units]):
        unit = units[index]
        unit_distinct, unit_tokens = n_distinct(unit), cost(unit, layout="packed")
        distinct, tokens = distinct + unit_distinct - shared, tokens + unit_tokens
        if joined and 2 * shared >= len(unit[0].token_ids) and max(distinct, tokens // MAX_SHARING) <= max_tokens:
            joined[-1] = joined[-1] + unit
        else:
            joined.append(unit)
            distinct, tokens = unit_distinct, unit_tokens
    return joined


def padding_samples(unit: Unit) -> Unit:
    """A copy of a unit that adds nothing to the loss: zero weights, no sampled log-probabilities."""
    return [
        s.copy_with(loss_weights=np.zeros_like(s.loss_weights), old_logprobs=np.full_like(s.old_logprobs, np.nan))
        for s in unit
    ]


def is_padding(batch: Sequence[Row]) -> bool:
    """True for a padding micro-batch: all weights are zero."""
    return not any(sample.loss_weights.any() for sample in batch)


def _longest(samples: Sequence[Row]) -> int:
    return max([len(sample.token_ids) for sample in samples])


@dataclass(frozen=True, slots=True)
class _Shape:
    """The numbers that a unit's cost depends on."""

    samples: int
    longest: int
    tokens: int


Share = list[int]
"""Indexes of the units in one micro-batch."""


def _minimize_shares(shapes: Sequence[_Shape], budget: int, n_ranks: int, layout: Layout) -> list[Share]:
    """The smallest number of micro-batches that keeps each within the token budget, the same for every rank; with
    padding, a few more if that saves padding. An empty share stands for a padding micro-batch."""
    unit_costs = [_cost(shapes, [index], layout) for index in range(len(shapes))]
    max_cost, filler = max(unit_costs), min(unit_costs)
    split = _split_padded if layout == "padded" else _split_packed

    @cache
    def shares(per_rank: int) -> list[Share]:
        units = split(shapes, per_rank * n_ranks)
        return units + [[]] * (-len(units) % n_ranks)

    def costs(per_rank: int) -> list[int]:
        return [_cost(shapes, share, layout) if share else filler for share in shares(per_rank)]

    def fits(per_rank: int) -> bool:
        share_costs = costs(per_rank)
        return max(share_costs) <= min(
            max(budget, max_cost), SLACK * max(sum(share_costs) / len(share_costs), max_cost)
        )

    tokens = sum(shape.tokens for shape in shapes)
    max_per_rank = -(-len(shapes) // n_ranks)  # one unit per micro-batch always fits
    best = fewest = _smallest_fitting(-(-tokens // (max(budget, max_cost) * n_ranks)), max_per_rank, fits)
    if layout != "padded":
        return shares(fewest)

    def total_cost(per_rank: int) -> float:
        return sum(costs(per_rank)) / n_ranks + per_rank * MIN_SAVING * budget

    for per_rank in range(fewest + 1, max_per_rank + 1):
        if tokens / n_ranks + per_rank * MIN_SAVING * budget >= total_cost(best):  # even without any padding
            break
        if fits(per_rank) and total_cost(per_rank) < total_cost(best):
            best = per_rank
    return shares(best)


def _smallest_fitting(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from `low` to `high` that fits, where `high` always does: a search in growing steps, then a
    binary search in the last step. (`fits` is not monotone, so the result may miss a smaller number.)"""
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


def _cost(shapes: Sequence[_Shape], share: Share, layout: Layout) -> int:
    if layout != "padded":
        return sum(shapes[index].tokens for index in share)
    return sum(shapes[index].samples for index in share) * max(shapes[index].longest for index in share)


def _split_packed(shapes: Sequence[_Shape], n: int) -> list[Share]:
    """Units in at most `n` shares with about the same tokens: the largest first, each to the share with the fewest."""
    shares: list[Share] = [[] for _ in range(min(n, len(shapes)))]
    loads = [(0, number) for number in range(len(shares))]  # a heap
    for index in sorted(range(len(shapes)), key=lambda index: -shapes[index].tokens):
        load, number = loads[0]
        shares[number].append(index)
        heapq.heapreplace(loads, (load + shapes[index].tokens, number))
    return shares


def _split_padded(shapes: Sequence[_Shape], n: int) -> list[Share]:
    """Units, sorted by falling length, in at most `n` shares of consecutive units, with the minimum maximum cost.

    A binary search for the smallest budget with which a greedy split has at most `n` shares. The greedy split is
    optimal for a sorted list, and monotone in the budget.
    """
    max_budget = sum(shape.samples for shape in shapes) * shapes[0].longest
    budget = bisect_left(range(max_budget), True, lo=1, key=lambda budget: len(_greedy_ranges(shapes, budget)) <= n)
    return [list(range(start, stop)) for start, stop in _greedy_ranges(shapes, budget)]


def _greedy_ranges(shapes: Sequence[_Shape], budget: int) -> list[tuple[int, int]]:
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


def _deal_to_ranks(batches: list[MicroBatch], n_ranks: int, layout: Layout) -> list[list[MicroBatch]]:
    """Give each rank the same number of micro-batches, the costliest first, each to the rank with the lowest load. So
    micro-batches that ranks compute at the same time have about the same cost."""
    per_rank = len(batches) // n_ranks
    ranks: list[list[MicroBatch]] = [[] for _ in range(n_ranks)]
    load = [0] * n_ranks
    costs = [cost(batch, layout=layout) for batch in batches]
    for index in sorted(range(len(batches)), key=lambda index: -costs[index]):
        rank = min((r for r in range(n_ranks) if len(ranks[r]) < per_rank), key=lambda r: (load[r], r))
        ranks[rank].append(batches[index])
        load[rank] += costs[index]
    return ranks


def network_inputs(
    samples: Sequence[Row],
    batches: Sequence[RowBatch],
    device: torch.device,
    layout: Layout,
    extra_ids: torch.Tensor | None = None,
    images: dict[str, torch.Tensor] | None = None,
) -> tuple[Any, ...]:
    """The network's arguments for a micro-batch, whose samples, in order, are padded to one length in `batches`: token
    ids [B, T], lengths [B], a bool mask [B, T] of tokens with a weight or sampled, temperatures [B, T], `extra_ids`,
    the layout of shared prefixes, and the tensors of `images`."""
    import torch

    token_ids, weights, old = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("token_ids", "loss_weights", "old_logprobs")
    )
    scales = np.ones(tuple(token_ids.shape), np.float32)
    for scale, sample in zip(scales, samples, strict=True):
        if sample.temperatures is not None:
            scale[: len(sample.temperatures)] = sample.temperatures
    # Training treats greedy sampling (0) as sampling at temperature 1.
    scales[scales == 0] = 1.0
    lengths = torch.tensor([len(sample.token_ids) for sample in samples], device=device)
    prefixes = SharedPrefixes(samples, device) if layout == "shared" else None
    mask = (weights != 0) | old.isfinite()
    return token_ids, lengths, mask, torch.from_numpy(scales).to(device), extra_ids, prefixes, images


def add_metrics(total: MetricSums, sums: MetricSums) -> None:
    """Add the sums of a micro-batch to `total`, in place; names that end in `/max` or `/min` get the maximum or
    minimum."""
    for name, (numerator, denominator) in sums.items():
        if name not in total:
            total[name] = (numerator, denominator)
        elif name.endswith("/max"):
            total[name] = (float(np.maximum(total[name][0], numerator)), 1.0)  # keeps a NaN
        elif name.endswith("/min"):
            total[name] = (float(np.minimum(total[name][0], numerator)), 1.0)
        else:
            total[name] = (total[name][0] + numerator, total[name][1] + denominator)


def merge_metrics(parts: Iterable[MetricSums]) -> dict[str, float]:
    """The metrics of micro-batches or ranks, added up and divided. One with denominator 0 is undefined and omitted."""
    total: MetricSums = {}
    for part in parts:
        add_metrics(total, part)
    return {name: numerator / denominator for name, (numerator, denominator) in total.items() if denominator}
