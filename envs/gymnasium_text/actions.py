"""Reading an action out of an answer, for the kinds of action space that text can write."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from envgym.errors import ConfigError

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)")


class Reader(ABC):
    """Reads the actions of one space. `hint` says how they are written."""

    hint: str

    def __init__(self, space: Any) -> None:
        self.space = space

    @abstractmethod
    def read(self, answer: str) -> Any:
        """The action an answer means, or None where it means none of this space."""


class OneNumber(Reader):
    """An action of a Discrete space: the last integer of the answer."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        first = int(space.start)
        self.hint = (
            f"Answer with the number of your action, {first} to {first + int(space.n) - 1}. The last number in your "
            "answer counts."
        )

    def read(self, answer: str) -> Any:
        found = _INTEGER.findall(answer)
        return int(found[-1]) if found and self.space.contains(int(found[-1])) else None


class Numbers(Reader):
    """An action of several numbers (Box, MultiDiscrete, MultiBinary): the last ones of the answer."""

    def __init__(self, space: Any, bounds: str) -> None:
        super().__init__(space)
        self.count = 1
        for length in space.shape:
            self.count *= int(length)
        counted = "one number" if self.count == 1 else f"{self.count} numbers, separated by spaces,"
        last = "number" if self.count == 1 else f"{self.count} numbers"
        self.hint = f"Answer with {counted} {bounds}. The last {last} in your answer count{'s' * (self.count == 1)}."

    def read(self, answer: str) -> Any:
        import numpy as np

        found = _NUMBER.findall(answer)[-self.count :]
        if len(found) < self.count:
            return None
        values = np.array([float(number) for number in found])
        if not np.all(np.isfinite(values)) or (self.space.dtype.kind in "iu" and np.any(values % 1)):
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            action = values.astype(self.space.dtype).reshape(self.space.shape)
        return action if self.space.contains(action) else None


class AnyText(Reader):
    """An action of a Text space: the answer as it stands, without space around it."""

    hint = "Your whole answer is your action."

    def read(self, answer: str) -> Any:
        action = answer.strip()
        return action if self.space.contains(action) else None


def reader_of(space: Any) -> Reader:
    """A reader of the actions of `space`. Raises `ConfigError` for kinds of space that no answer can write."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return OneNumber(space)
    if isinstance(space, spaces.Box):
        import numpy as np

        low, high = space.low.flatten(), space.high.flatten()
        if np.all(low == low[0]) and np.all(high == high[0]):
            return Numbers(space, f"between {low[0]:g} and {high[0]:g}")
        return Numbers(space, f"between {low.tolist()} and {high.tolist()}")
    if isinstance(space, spaces.MultiDiscrete):
        return Numbers(space, f"from {space.start.flatten().tolist()} to below {(space.start + space.nvec).tolist()}")
    if isinstance(space, spaces.MultiBinary):
        return Numbers(space, "that are 0 or 1")
    if isinstance(space, spaces.Text):
        return AnyText(space)
    raise ConfigError(
        f"actions of the kind {type(space).__name__} cannot be written as text: wrap the environment so that they are "
        "Discrete, Box, MultiDiscrete, MultiBinary or Text"
    )
