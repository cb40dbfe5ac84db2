"""How a Gymnasium environment is put into words: its rules, what is to be seen, and how an action is written.

Two environments have texts of their own (`frozen_lake`, `taxi`); all others get `GenericView`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from .actions import Reader, reader_of
from .documentation import documented_rules
from .observations import written

if TYPE_CHECKING:
    import gymnasium

_COLOURED = re.compile(r"\x1b\[[0-9;]+m([^\x1b]*)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class View(ABC):
    """Puts one instance of an environment into words."""

    invalid_reward = 0.0
    """What an answer without an action costs unless the settings say otherwise."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.world: Any = env.unwrapped

    @property
    @abstractmethod
    def rules(self) -> str:
        """What the environment is about."""

    @property
    @abstractmethod
    def hint(self) -> str:
        """How an action is written."""

    @abstractmethod
    def state(self, observation: Any, reward: float | None) -> str:
        """What is to be seen now. `reward` is what the last action earned; None at the beginning."""

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

    @property
    def hint(self) -> str:
        return f"Answer with one of the words {', '.join(self.words)}. The last of them in your answer counts."

    def read(self, answer: str) -> Any:
        said = re.findall(rf"\b({'|'.join(self.words)})\b", answer.lower())
        return self.words.index(said[-1]) if said else None

    def write(self, action: int) -> str:
        return self.words[action]


class GenericView(View):
    """Says what the environment's documentation says, and shows its text rendering or else the observation.

    Raises `ConfigError` for spaces that have no text form.
    """

    # Many environments charge for every step: an answer without an action must not be the cheaper choice.
    invalid_reward = -1.0

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._reader: Reader = reader_of(env.action_space)

    @property
    def rules(self) -> str:
        name = self.env.spec.id if self.env.spec is not None else type(self.world).__name__
        return f"You are playing {name}.\n\n{documented_rules(type(self.world))}".rstrip()

    @property
    def hint(self) -> str:
        return self._reader.hint

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


def view_of(env: gymnasium.Env[Any, Any]) -> View:
    """The view that fits an environment."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    from .frozen_lake import FrozenLakeView
    from .taxi import TaxiView

    if isinstance(env.unwrapped, FrozenLakeEnv):
        return FrozenLakeView(env)
    if isinstance(env.unwrapped, TaxiEnv):
        return TaxiView(env)
    return GenericView(env)
