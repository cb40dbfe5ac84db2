"""What files for OpenRLHF return, as plain numbers: tensors, arrays, lists or numbers, in any mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envgym.env.rewards.functions import number
from envgym.errors import InvalidStep

ROUNDING = 1e-6
"""How far outside [0, 1] a score may be from rounding in 32 bits."""


def plain(value: Any) -> Any:
    """A tensor or an array as numbers and lists; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def flat(value: Any) -> Any:
    """The same, without dimensions of one: a column of shape [n, 1] is a list of n."""
    values = plain(value)
    if isinstance(values, list | tuple):
        return [item[0] if isinstance(item, list | tuple) and len(item) == 1 else item for item in map(plain, values)]
    return values


def valid_score(score: float | None) -> float | None:
    """A score in [0, 1]; None for one that is not."""
    if score is None or not -ROUNDING <= score <= 1 + ROUNDING:
        return None
    return min(1.0, max(0.0, score))


def finite_logs(logs: Any) -> dict[str, float]:
    """What an agent logged, as metrics: one number for each name, of several their mean. What is no number is left
    out."""
    metrics: dict[str, float] = {}
    for key, value in (logs if isinstance(logs, Mapping) else {}).items():
        values = flat(value)
        values = values if isinstance(values, list) else [values]
        try:
            numbers = [number(item, "") for item in values]
        except InvalidStep:
            continue
        known = [item for item in numbers if item is not None]
        if known:
            metrics[str(key)] = sum(known) / len(known)
    return metrics
