"""A Gymnasium environment in words: its rules, its state, and its actions, which are parsed from answers.

`GenericView` reads the rules from the class's documentation and shows the text rendering or the observation.
"""

from __future__ import annotations

import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envgym.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium

SECTIONS = ("description", "action space", "observation space", "reward", "rewards", "goal")
"""The sections of Gymnasium's documentation that a player needs; the others are for programmers."""
MAX_RULES = 4000
"""Characters to show of a documentation without such sections."""
WORST_REWARDS = {"Pendulum": -16.2736044, "LunarLander": -100.0, "BipedalWalker": -100.0}
"""The lowest reward of a step in those of Gymnasium's games where it is below -1, by their documentation."""
MOST_NUMBERS = 1000
"""Maximum numbers of an observation to write as text; a larger one is an image."""

_COLOURED = re.compile(r"\x1b\[[0-9;]+m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class View(ABC):
    """Puts one instance of an environment into words."""

    rules: str
    """Explanation of the environment."""
    hint: str
    """Explanation of the form of an action."""
    invalid_reward = 0.0
    """Reward of an answer without an action, unless the settings give another."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.world: Any = env.unwrapped

    @abstractmethod
    def state(self, observation: Any, reward: float | None) -> str:
        """The state as text. `reward` is the last action's; None at the beginning."""

    @abstractmethod
    def read(self, answer: str) -> Any:
        """Parse an answer as an action; None if it has none."""

    @abstractmethod
    def write(self, action: int) -> str:
        """Write an action as an answer; the inverse of `read` for numbered actions."""

    def success(self, reward: float, terminated: bool) -> float | None:
        """1 if the last step reached the goal, 0 if not (yet); None if the game defines none."""
        return None


class WordView(View):
    """A view whose numbered actions have names."""

    words: tuple[str, ...]
    """The name of each action."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.hint = f"Answer with one of the words {', '.join(self.words)}. The last of them in your answer counts."

    def read(self, answer: str) -> Any:
        words = re.findall(rf"\b({'|'.join(self.words)})\b", answer.lower())
        return self.words.index(words[-1]) if words else None

    def write(self, action: int) -> str:
        return self.words[action]


class GenericView(View):
    """The rules of the environment's documentation, and its text rendering or else the observation.

    Raises `ConfigError` for spaces that have no text form.
    """

    # Many environments have a cost per step: an answer without an action must not be cheaper.
    invalid_reward = -1.0

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.hint, self._read = reader_of(env.action_space)
        name = env.spec.id if env.spec is not None else type(self.world).__name__
        lowest = (reward for game, reward in WORST_REWARDS.items() if name.rpartition("/")[2].startswith(game))
        self.invalid_reward = next(lowest, self.invalid_reward)
        self.rules = f"You are playing {name}.\n\n{documented_rules(type(self.world))}".rstrip()

    def state(self, observation: Any, reward: float | None) -> str:
        text = plain(self.env.render()) if self.env.render_mode == "ansi" else as_text(observation)
        return text if reward is None else f"Reward: {reward:g}\n{text}"

    def read(self, answer: str) -> Any:
        return self._read(answer)

    def write(self, action: int) -> str:
        return str(action)


def plain(rendering: Any) -> str:
    """A text rendering without escape codes. Coloured text, often the player's position, is put in brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", str(rendering))).strip("\n")


def documented_rules(cls: type) -> str:
    """The sections of a class's docstring that explain the game, or all of it; empty without a docstring."""
    text = _without_markup(inspect.cleandoc(cls.__doc__ or ""))
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    sections = zip(parts[1::2], parts[2::2], strict=True)
    rules = [f"{title}\n{body.strip()}" for title, body in sections if title.strip().lower() in SECTIONS]
    return "\n\n".join(rules) if rules else text[:MAX_RULES].strip()


def _without_markup(text: str) -> str:
    text = re.sub(r"!\[[^\[\]]*\]\([^()]+\)", "", text).replace("<sup>", "^")
    text = re.sub(r"</?\w[^<>]*>", "", text)
    return re.sub(r"\[([^\[\]]+)\]\([^()]+\)", r"\1", text)


def as_text(observation: Any) -> str:
    """Write an observation as text: numbers to four digits, mappings with one entry per line."""
    import numpy as np

    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return "\n".join(f"{name}: {as_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple | list):
        return f"({', '.join(as_text(value) for value in observation)})"
    if isinstance(observation, np.ndarray) and observation.ndim:
        return np.array2string(observation, precision=4, separator=", ", suppress_small=True, threshold=MOST_NUMBERS)
    if isinstance(observation, float | np.floating):
        return f"{observation:.4g}"
    return str(observation)


def check_writable(space: Any) -> None:
    """Raise `ConfigError` for a space whose observations are too large to write out."""
    if (count := _size(space)) > MOST_NUMBERS:
        raise ConfigError(
            f"its observations are of {count} numbers, which text cannot show: wrap the environment so that it "
            "renders text (render mode ansi) or observes less, or set env.observation=image"
        )


def is_picture(space: Any) -> bool:
    """True for a space of uint8 arrays [height, width, 3]."""
    shape = list(getattr(space, "shape", None) or ())
    return len(shape) == 3 and shape[2] == 3 and str(space.dtype) == "uint8"


def _size(space: Any) -> int:
    parts = getattr(space, "spaces", None)
    if parts is not None:
        return sum(_size(part) for part in (parts.values() if hasattr(parts, "values") else parts))
    return math.prod(map(int, getattr(space, "shape", None) or ()))


# -- actions ------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\w)")


Reader = tuple[str, Callable[[str], Any]]
"""Explanation of the form of a space's actions, and a function that parses an answer as an action of the space; None if
it is none."""


def reader_of(space: Any) -> Reader:
    """The reader of the actions of `space`. Raises `ConfigError` for kinds of space whose actions are not text."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return _integer(space)
    if isinstance(space, spaces.Box):
        import numpy as np

        low, high = space.low.flatten(), space.high.flatten()
        if np.all(low == low[0]) and np.all(high == high[0]):
            return _vector(space, f"between {low[0]:g} and {high[0]:g}")
        return _vector(space, f"between {low.tolist()} and {high.tolist()}")
    if isinstance(space, spaces.MultiDiscrete):
        return _vector(space, f"from {space.start.flatten().tolist()} to below {(space.start + space.nvec).tolist()}")
    if isinstance(space, spaces.MultiBinary):
        return _vector(space, "that are 0 or 1")
    if isinstance(space, spaces.Text):
        return _text(space)
    raise ConfigError(
        f"actions of the kind {type(space).__name__} cannot be written as text: wrap the environment so that they are "
        "Discrete, Box, MultiDiscrete, MultiBinary or Text"
    )


def _integer(space: Any) -> Reader:
    """Hint and reader for a Discrete space: the last integer of the answer, or None if it is no action."""
    first = int(space.start)
    last = first + int(space.n) - 1

    def read(answer: str) -> Any:
        integers = _INTEGER.findall(answer)
        return int(integers[-1]) if integers and space.contains(int(integers[-1])) else None

    return f"Answer with the number of your action, {first} to {last}. The last number in your answer counts.", read


def _vector(space: Any, bounds: str) -> Reader:
    """Hint and reader for a space of several numbers (Box, MultiDiscrete, MultiBinary): the last ones of the answer, or
    None if they are no action."""
    count = math.prod(map(int, space.shape))
    counted, last = "one number", "number in your answer counts"
    if count != 1:
        counted, last = f"{count} numbers, separated by spaces,", f"{count} numbers in your answer count"

    def read(answer: str) -> Any:
        import numpy as np

        numbers = _NUMBER.findall(answer)[-count:]
        if len(numbers) < count:
            return None
        values = np.array([float(number) for number in numbers])
        if not np.all(np.isfinite(values)) or (space.dtype.kind in "iu" and np.any(values % 1)):
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            action = values.astype(space.dtype).reshape(space.shape)
        return action if space.contains(action) else None

    return f"Answer with {counted} {bounds}. The last {last}.", read


def _text(space: Any) -> Reader:
    """Read an action of a Text space: the answer without surrounding whitespace."""

    def read(answer: str) -> Any:
        return answer.strip() if space.contains(answer.strip()) else None

    return "Your whole answer is your action.", read
