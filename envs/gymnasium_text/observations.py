"""Writing an observation down as text."""

from __future__ import annotations

from typing import Any

from envgym.errors import ConfigError

MOST_NUMBERS = 1000
"""Numbers of an observation that is still written out; what has more is an image."""


def written(observation: Any) -> str:
    """An observation as text: numbers to four digits, mappings one entry a line."""
    import numpy as np

    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return "\n".join(f"{name}: {written(value)}" for name, value in observation.items())
    if isinstance(observation, tuple | list):
        return f"({', '.join(written(value) for value in observation)})"
    if isinstance(observation, np.ndarray) and observation.ndim:
        return np.array2string(observation, precision=4, separator=", ", suppress_small=True, threshold=MOST_NUMBERS)
    if isinstance(observation, float | np.floating):
        return f"{observation:.4g}"
    return str(observation)


def check_writable(space: Any) -> None:
    """Raise `ConfigError` for a space whose observations are too large to write out."""
    if (count := _numbers(space)) > MOST_NUMBERS:
        raise ConfigError(
            f"its observations are of {count} numbers, which text cannot show: wrap the environment so that it "
            "renders text (render mode ansi) or observes less"
        )


def _numbers(space: Any) -> int:
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return sum(_numbers(part) for part in (parts.values() if hasattr(parts, "values") else parts))
    count = 1
    for length in getattr(space, "shape", None) or ():
        count *= int(length)
    return count
