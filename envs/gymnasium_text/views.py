"""A Gymnasium environment in words: its rules, its state, and its actions.

`GenericView` reads the rules from the class's documentation and shows the text rendering or the observation.
"""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

from .actions import reader_of

if TYPE_CHECKING:
    import gymnasium

SECTIONS = ("description", "action space", "observation space", "reward", "rewards", "goal")
"""The sections of Gymnasium's own pages that a player needs; the others are for programmers."""
LONGEST = 4000
"""Characters of a documentation without such sections that are still shown."""
MOST_NUMBERS = 1000
"""Numbers of an observation that is still written out; what has more is an image."""

_COLOURED = re.compile(r"\x1b\[[0-9;]+m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class View(ABC):
    """Puts one instance of an environment into words."""

    rules: str
    """Explanation of the environment."""
    hint: str
    """Explanation of how an action is written."""
    invalid_reward = 0.0
    """Reward of an answer without an action, unless the settings give another."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.world: Any = env.unwrapped

    @abstractmethod
    def state(self, observation: Any, reward: float | None) -> str:
        """The state as text. `reward` is what the last action earned; None at the beginning."""

    @abstractmethod
    def read(self, answer: str) -> Any:
        """The action an answer means, or None."""

    @abstractmethod
    def write(self, action: int) -> str:
        """The answer that means an action; the inverse of `read` for numbered actions."""

    def success(self, reward: float, terminated: bool) -> float | None:
        """1 where the last step reached the aim, 0 where not (yet); None where no aim is defined."""
        return None


class WordView(View):
    """A view whose numbered actions have names."""

    words: tuple[str, ...]
    """The name of each action."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.hint = f"Answer with one of the words {', '.join(self.words)}. The last of them in your answer counts."

    def read(self, answer: str) -> Any:
        found = re.findall(rf"\b({'|'.join(self.words)})\b", answer.lower())
        return self.words.index(found[-1]) if found else None

    def write(self, action: int) -> str:
        return self.words[action]


class GenericView(View):
    """The rules of the environment's documentation, and its text rendering or else the observation.

    Raises `ConfigError` for spaces that have no text form.
    """

    # Many environments charge for every step: an answer without an action must not be the cheaper choice.
    invalid_reward = -1.0

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._reader = reader_of(env.action_space)
        self.hint = self._reader.hint
        name = env.spec.id if env.spec is not None else type(self.world).__name__
        self.rules = f"You are playing {name}.\n\n{documented_rules(type(self.world))}".rstrip()

    def state(self, observation: Any, reward: float | None) -> str:
        seen = plain(self.env.render()) if self.env.render_mode == "ansi" else written(observation)
        return seen if reward is None else f"Reward: {reward:g}\n{seen}"

    def read(self, answer: str) -> Any:
        return self._reader.read(answer)

    def write(self, action: int) -> str:
        return str(action)


def plain(rendering: Any) -> str:
    """A text rendering without escape codes; what was coloured, often the player's place, is put in brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", str(rendering))).strip("\n")


def documented_rules(cls: type) -> str:
    """The parts of a class's docstring that say how to play, or all of it; empty where it has none."""
    text = _without_markup(inspect.cleandoc(cls.__doc__ or ""))
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    kept = [f"{title}\n{body.strip()}" for title, body in sections if title.strip().lower() in SECTIONS]
    return "\n\n".join(kept) if kept else text[:LONGEST].strip()


def _without_markup(text: str) -> str:
    text = re.sub(r"!\[[^\[\]]*\]\([^()]+\)", "", text).replace("<sup>", "^")
    text = re.sub(r"</?\w[^<>]*>", "", text)
    return re.sub(r"\[([^\[\]]+)\]\([^()]+\)", r"\1", text)


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
    return math.prod(map(int, getattr(space, "shape", None) or ()))
