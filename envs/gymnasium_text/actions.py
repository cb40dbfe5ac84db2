"""Reading an action out of an answer, for the kinds of action space that text can write."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from envgym.errors import ConfigError

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)")


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the actions of one space: `read` returns the action an answer means, or None where it means none of this
    space; `hint` explains how actions are written."""

    hint: str
    read: Callable[[str], Any]


def reader_of(space: Any) -> Reader:
    """A reader of the actions of `space`. Raises `ConfigError` for kinds of space that no answer can write."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return _one_number(space)
    if isinstance(space, spaces.Box):
        import numpy as np

        low, high = space.low.flatten(), space.high.flatten()
        if np.all(low == low[0]) and np.all(high == high[0]):
            return _numbers(space, f"between {low[0]:g} and {high[0]:g}")
        return _numbers(space, f"between {low.tolist()} and {high.tolist()}")
    if isinstance(space, spaces.MultiDiscrete):
        return _numbers(space, f"from {space.start.flatten().tolist()} to below {(space.start + space.nvec).tolist()}")
    if isinstance(space, spaces.MultiBinary):
        return _numbers(space, "that are 0 or 1")
    if isinstance(space, spaces.Text):
        return _any_text(space)
    raise ConfigError(
        f"actions of the kind {type(space).__name__} cannot be written as text: wrap the environment so that they are "
        "Discrete, Box, MultiDiscrete, MultiBinary or Text"
    )


def _one_number(space: Any) -> Reader:
    """An action of a Discrete space: the last integer of the answer."""
    first = int(space.start)
    last = first + int(space.n) - 1

    def read(answer: str) -> Any:
        found = _INTEGER.findall(answer)
        return int(found[-1]) if found and space.contains(int(found[-1])) else None

    return Reader(
        f"Answer with the number of your action, {first} to {last}. The last number in your answer counts.", read
    )


def _numbers(space: Any, bounds: str) -> Reader:
    """An action of several numbers (Box, MultiDiscrete, MultiBinary): the last ones of the answer."""
    count = math.prod(map(int, space.shape))
    counted, last = "one number", "number in your answer counts"
    if count != 1:
        counted, last = f"{count} numbers, separated by spaces,", f"{count} numbers in your answer count"

    def read(answer: str) -> Any:
        import numpy as np

        found = _NUMBER.findall(answer)[-count:]
        if len(found) < count:
            return None
        values = np.array([float(number) for number in found])
        if not np.all(np.isfinite(values)) or (space.dtype.kind in "iu" and np.any(values % 1)):
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            action = values.astype(space.dtype).reshape(space.shape)
        return action if space.contains(action) else None

    return Reader(f"Answer with {counted} {bounds}. The last {last}.", read)


def _any_text(space: Any) -> Reader:
    """An action of a Text space: the answer as it stands, without space around it."""

    def read(answer: str) -> Any:
        return answer.strip() if space.contains(answer.strip()) else None

    return Reader("Your whole answer is your action.", read)
