"""Several task sets as one: one after the other, or in fixed proportions, for training or for evaluation."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, count

from envgym.hashing import derived_seed
from envgym.types import Task

from .rows import locate
from .task_set import EpochOrder, TaskSet

LARGEST_BLOCK = 1000
"""Maximum tasks of a block with exact proportions; proportions that need a larger one are rounded."""
READ_AHEAD = 2**17
"""Index bound of an endless merged set, since its order is computed up to the largest index."""


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
        part, part_index = self._locate(index)
        return await self._parts[part].get(part_index)

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of the part that has the task `index`, and the task's index in it."""
        return locate(self._ends, index)


class Interleaved(Joined):
    """Task sets drawn in exact proportions, endlessly.

    The order consists of blocks; in each, every set has its share of the tasks, evenly spread, in a separate random
    order. A finite set repeats, each epoch in another order; an endless one is read in its own order. Task `index`
    depends on the index and the seed alone.
    """

    def __init__(self, parts: Sequence[TaskSet], weights: Sequence[float], seed: int = 0) -> None:
        if any(part.size == 0 for part in parts):
            raise ValueError("an empty task set has nothing to interleave")
        super().__init__(parts)
        self._weights = list(weights)
        self._seed = seed
        self._counts = block_counts(weights)
        self._block: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._orders = [EpochOrder(part.size, seed, "part", number) for number, part in enumerate(parts)]

    @property
    def size(self) -> None:
        return None

    @property
    def index_bound(self) -> int:
        """About one epoch of the smallest set."""
        block = sum(self._counts)
        counted = zip(self._parts, self._counts, strict=True)
        return max(1, min(part.index_bound * block // count for part, count in counted))

    def with_seed(self, seed: int) -> TaskSet:
        return Interleaved([part.with_seed(seed) for part in self._parts], self._weights, seed)

    def _locate(self, index: int) -> tuple[int, int]:
        block, slot = divmod(index, sum(self._counts))
        if block != self._block[0]:
            self._block = (block, self._order(block))
        part, number = self._block[1][slot]
        return part, self._orders[part][block * self._counts[part] + number]

    def _order(self, block: int) -> list[tuple[int, int]]:
        """(part, number) of each slot: a part's n tasks lie one in each n-th of the block, at a random point in it."""
        rng = random.Random(derived_seed(self._seed, "block", block))
        slots = [
            ((number + rng.random()) / count, part, number)
            for part, count in enumerate(self._counts)
            for number in range(count)
        ]
        return [(part, number) for _, part, number in sorted(slots)]

    @property
    def epoch_size(self) -> int | None:
        """Number of draws until the last of the sets is exhausted; None if one of them is endless."""
        sizes, total = [part.size for part in self._parts], sum(self._counts)
        if None in sizes:
            return None
        return max(math.ceil((size or 0) * total / count) for size, count in zip(sizes, self._counts, strict=True))


class InProportion(Joined):
    """Task sets merged in fixed proportions, each in its own order and without repetition, for evaluation.

    A set is skipped after its end, so that finite sets are read completely.
    """

    def __init__(self, parts: Sequence[TaskSet], weights: Sequence[float]) -> None:
        super().__init__(parts)
        # The order is computed up to the largest index read.
        self._merged = heapq.merge(*map(_positions, count(), parts, weights))
        self._order: list[tuple[int, int]] = []

    @property
    def index_bound(self) -> int:
        endless = [part.index_bound for part in self._parts if part.size is None]
        return min(*endless, READ_AHEAD) if endless else super().index_bound

    def _locate(self, index: int) -> tuple[int, int]:
        while len(self._order) <= index:
            _, part, number = next(self._merged)
            self._order.append((part, number))
        return self._order[index]


def _positions(part: int, tasks: TaskSet, weight: float) -> Iterator[tuple[float, int, int]]:
    """(position, part, number) of a set's tasks, whose positions are 1/weight apart."""
    for number in count() if tasks.size is None else range(tasks.size):
        yield (number + 0.5) / weight, part, number


def block_counts(weights: Sequence[float]) -> list[int]:
    """Number of tasks for each weight in the smallest block that has the weights' proportions."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    for block in range(len(weights), LARGEST_BLOCK + 1):
        counts = [round(share * block) for share in shares]
        if all(count and abs(count - share * block) < 1e-6 for count, share in zip(counts, shares, strict=True)):
            return counts
    return [max(1, round(share * LARGEST_BLOCK)) for share in shares]
