"""Several task sets as one: one after the other; for training without end, or for evaluation, in given proportions."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from itertools import accumulate

from envgym.env import TaskSet
from envgym.hashing import derived_seed
from envgym.types import Task

from .rows import locate

LARGEST_BLOCK = 1000
"""Proportions are kept exactly over a block of at most so many tasks; those that need more are rounded to it."""
READ_AHEAD = 2**17
"""Tasks of a merged set without end that may be drawn from: a far one has the order made up to where it is."""


class Joined(TaskSet):
    """Task sets one after the other. Subclasses put their tasks in another order."""

    def __init__(self, parts: Sequence[TaskSet]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(part.size or 0 for part in parts))

    @property
    def size(self) -> int | None:
        sizes = [part.size for part in self._parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    async def get(self, index: int) -> Task:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(index)
        part, place = self._place(index)
        return await self._parts[part].get(place)

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the part that has the task `index`, and the task's index in it."""
        return locate(self._ends, index)


class Interleaved(Joined):
    """Task sets drawn in exact proportions, without end.

    The order is cut into blocks, in each of which every set has its share, evenly spread, in an order of the block's
    own. A finite set is gone through again and again, each time in another order and without repetition; an endless
    one is taken in its order. Task `index` depends on the index and the seed alone.
    """

    def __init__(self, parts: Sequence[TaskSet], weights: Sequence[float], seed: int = 0) -> None:
        if any(part.size == 0 for part in parts):
            raise ValueError("an empty task set has nothing to interleave")
        super().__init__(parts)
        self._weights = list(weights)
        self._seed = seed
        self._counts = block_counts(weights)
        self._block: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._epochs: list[tuple[int, list[int]]] = [(-1, [])] * len(self._parts)

    @property
    def size(self) -> None:
        return None

    @property
    def index_bound(self) -> int:
        """About as far as every finite set is gone through once."""
        block = sum(self._counts)
        counted = zip(self._parts, self._counts, strict=True)
        return max(1, min(part.index_bound * block // count for part, count in counted))

    def with_seed(self, seed: int) -> TaskSet:
        return Interleaved([part.with_seed(seed) for part in self._parts], self._weights, seed)

    def _place(self, index: int) -> tuple[int, int]:
        block, slot = divmod(index, sum(self._counts))
        if block != self._block[0]:
            self._block = (block, self._order(block))
        part, place = self._block[1][slot]
        return part, self._index(part, block * self._counts[part] + place)

    def _order(self, block: int) -> list[tuple[int, int]]:
        """(part, place) of each slot: a part's n places lie one in each n-th of the block, anywhere in it."""
        rng = random.Random(derived_seed(self._seed, "block", block))
        slots = [
            ((place + rng.random()) / count, part, place)
            for part, count in enumerate(self._counts)
            for place in range(count)
        ]
        return [(part, place) for _, part, place in sorted(slots)]

    def _index(self, part: int, draw: int) -> int:
        """The index in `part` of the task that is drawn from it as number `draw`."""
        size = self._parts[part].size
        if size is None:
            return draw
        epoch, place = divmod(draw, size)
        if epoch != self._epochs[part][0]:
            order = list(range(size))
            random.Random(derived_seed(self._seed, "part", part, epoch)).shuffle(order)
            self._epochs[part] = (epoch, order)
        return self._epochs[part][1][place]


class InProportion(Joined):
    """Task sets merged in given proportions, each in its own order and none repeated, for evaluation.

    A set that has come to its end is left out from there on, so that all tasks come where all sets are finite.
    """

    def __init__(self, parts: Sequence[TaskSet], weights: Sequence[float]) -> None:
        super().__init__(parts)
        self._weights = list(weights)
        # Each task falls due at a time: a set's tasks at steps of 1/weight. The order is made as far as it is read.
        self._due = [(0.5 / weight, part, 0) for part, weight in enumerate(weights) if parts[part].size != 0]
        heapq.heapify(self._due)
        self._order: list[tuple[int, int]] = []

    @property
    def index_bound(self) -> int:
        endless = [part.index_bound for part in self._parts if part.size is None]
        return min(*endless, READ_AHEAD) if endless else super().index_bound

    def _place(self, index: int) -> tuple[int, int]:
        while len(self._order) <= index:
            _, part, number = heapq.heappop(self._due)
            self._order.append((part, number))
            size = self._parts[part].size
            if size is None or number + 1 < size:
                heapq.heappush(self._due, ((number + 1.5) / self._weights[part], part, number + 1))
        return self._order[index]


def block_counts(weights: Sequence[float]) -> list[int]:
    """Tasks of each weight in the smallest block that has the weights' proportions."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    for block in range(len(weights), LARGEST_BLOCK + 1):
        counts = [round(share * block) for share in shares]
        if all(count and abs(count - share * block) < 1e-6 for count, share in zip(counts, shares, strict=True)):
            return counts
    return [max(1, round(share * LARGEST_BLOCK)) for share in shares]
