"""From several orders of the same answers to what each is worth."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import combinations


def order_of(key: str, answers: Sequence[str], number: int) -> list[int]:
    """The order in which answers are shown for the `number`th time: shuffled by what is asked, then the same backwards,
    then shuffled anew, and so on. A judge that favours a place favours it for both ends of every pair."""
    text = "\x1f".join([key, str(number // 2), *answers])
    rng = random.Random(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())
    order = rng.sample(range(len(answers)), len(answers))
    return order[::-1] if number % 2 else order


def standing(rankings: Sequence[Sequence[int]]) -> list[float]:
    """Each item's mean place over rankings (best first), as 1 for always first down to 0 for always last."""
    count = len(rankings[0])
    places = [[ranking.index(item) for ranking in rankings] for item in range(count)]
    return [1 - sum(place) / len(place) / (count - 1) for place in places]


def agreement(rankings: Sequence[Sequence[int]]) -> float:
    """The share of pairs of items that all rankings put in the same order."""
    pairs = list(combinations(range(len(rankings[0])), 2))
    return sum(len({r.index(a) < r.index(b) for r in rankings}) == 1 for a, b in pairs) / len(pairs)
