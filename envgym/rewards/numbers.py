"""The numbers of an episode as users' code returns them: reward, score and metrics, checked."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

MAX_NAME = 200
"""Maximum characters of a metric's name, which may be a server's."""


def check_numbers(reward: Any, info: dict[str, Any]) -> float | None:
    """Convert a step's reward to a number, and `score` and `metrics` in `info`, in place. Raises `ValueError`."""
    number = None if reward is None else _number("a reward", reward)
    if (score := info.get("score")) is not None:
        info["score"] = score = _number("a score", score)
        if not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not at {score:g}")
    if (metrics := info.get("metrics")) is not None:
        if not isinstance(metrics, Mapping):
            raise ValueError(f"info['metrics'] is names to numbers, not {describe(metrics)}")
        info["metrics"] = finite_metrics(metrics)
    return number


def _number(label: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # the usual case: the check below is slow
        return value
    if not isinstance(value, Real) and not hasattr(value, "__float__"):
        raise ValueError(f"{label} is a number or None, not {describe(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers, say
        raise ValueError(f"{label} is one number, not {value!r:.80} ({error})") from None
    if not math.isfinite(number):
        raise ValueError(f"{label} must be finite, not {number}")
    return number


def describe(value: Any) -> str:
    """A wrong return value, as a phrase for an error message."""
    if not (coroutines := coroutines_in(value)):
        return f"{value!r:.80}"
    for coroutine in coroutines:
        coroutine.close()  # prevents Python's later warning that it was never awaited
    return f"a coroutine: an await is missing before {coroutines[0].__name__}(…)"


def coroutines_in(value: Any) -> list[Any]:
    """The coroutines in a return value, at any depth of tuples, lists and mappings."""
    if inspect.iscoroutine(value):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [coroutine for part in parts for coroutine in coroutines_in(part)]


def finite_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics that are finite numbers with names of at most `MAX_NAME` characters, and the number of others as
    `invalid_metrics`."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if math.isfinite(number := float(value)) and len(str(name)) <= MAX_NAME:
                numbers[str(name)] = number
    n_invalid = len(metrics) - len(numbers)
    return numbers | {"invalid_metrics": float(n_invalid)} if n_invalid else numbers
