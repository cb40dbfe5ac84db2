"""Gymnasium environments as text games: the policy reads the state, or sees it, and answers with an action as text.

FrozenLake and Taxi have rules and maps written for readers. Any other environment shows its own documentation and its
text rendering (or else its observations), and its actions are numbers. As a picture, any shows its rendering.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult, TaskSet
from envgym.errors import ConfigError, NameNotFound, VersionNotFound, needs
from envgym.types import Action, Message, Task

from .toy_text import frozen_lake_maps, shortest_actions, view_of
from .views import check_writable, is_picture

if TYPE_CHECKING:
    import gymnasium


class GymnasiumTextConfig(EnvConfig):
    """Settings of the environment."""

    game: str = "FrozenLake-v1"
    """Gymnasium's id of the environment, also `module:Id-v0`. Unset: FrozenLake on ice without slipping
    (`kwargs={is_slippery: false}`) and with `map_size=4`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `gymnasium.make`."""
    map_size: int | None = Field(None, ge=3, le=32)
    """FrozenLake only: squares per side of the map, which each task draws by its seed. Unset: the game's own map."""
    observation: Literal["text", "image", "both"] = "text"
    """What the policy is shown. `image`: the game's picture, by its render mode `rgb_array`, or its observation if that
    is a picture. FrozenLake and others of Gymnasium's need `pygame` for it."""
    rules: str | None = None
    """Explanation of the game at the beginning. Unset: envgym's own text, or the game's documentation."""
    max_turns: int = Field(30, ge=1)
    """Answers after which an episode is truncated; answers without an action count as well. The game's own limit of
    steps holds too."""
    invalid_reward: float | None = None
    """Reward of an answer without an action. Unset: 0 on FrozenLake, -10 (an illegal action's) on Taxi, the lowest
    reward of a step on Pendulum, LunarLander and BipedalWalker, else -1; or the lowest reward of the episode so far."""

    @model_validator(mode="before")
    @classmethod
    def _example(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and "game" not in settings:
            return {"kwargs": {"is_slippery": False}, "map_size": 4, **settings}
        return settings

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.map_size is not None and "FrozenLake" not in self.game:
            raise ValueError(f"map_size is for FrozenLake, not {self.game}")
        return self


class GymnasiumTextEnv(Env):
    """One game of Gymnasium in words. Its methods block, as Gymnasium's do: each instance has its own thread."""

    spec: GymnasiumText
    config: GymnasiumTextConfig

    _game: gymnasium.Env[Any, Any] | None = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.close()
        self._game = self.spec.new_game(self.task)
        self._view = view_of(self._game)
        self._turns = self._invalid = 0
        self._lowest_reward = 0.0
        observation, _ = self._game.reset(seed=seed)
        rules = self.config.rules
        if rules is None:
            rules = self._view.rules
            if self.config.observation == "image":  # which has no letters to explain
                rules = "\n".join(line for line in rules.splitlines() if not line.startswith("The map: "))
        *pictures, state = self._content(observation, None)
        text = "\n\n".join(part for part in (rules, self._view.hint, state) if part)
        return [Message("user", [*pictures, text])], {}

    def step(self, action: Action) -> StepResult:  # type: ignore[override]
        assert self._game is not None  # a reset came first
        self._turns += 1
        move = self._view.read(action.text)
        if move is None:
            self._invalid += 1
            content = [f"There is no action in your answer. {self._view.hint}"]
            reward, terminated, truncated = self.config.invalid_reward, False, False
            reward = min(self._view.invalid_reward, self._lowest_reward) if reward is None else reward
        else:
            observation, reward, terminated, truncated, _ = self._game.step(move)
            reward = float(reward)
            self._lowest_reward = min(self._lowest_reward, reward)
            content = self._content(observation, reward)
        truncated = bool(truncated) or self._turns >= self.config.max_turns
        metrics = {"turns": self._turns, "invalid_actions": self._invalid}
        info: Info = {"score": self._view.success(reward, bool(terminated)), "metrics": metrics}
        return [Message("user", content)], reward, bool(terminated), truncated and not terminated, info

    def _content(self, observation: Any, reward: float | None) -> list[Any]:
        """The state as the policy is shown it: a picture, if any, and a text."""
        assert self._game is not None
        kind, text = self.config.observation, ""
        if kind != "image":
            text = self._view.state(observation, reward)
        elif reward is not None:
            text = f"Reward: {reward:g}"
        if kind == "text":
            return [text]
        return [observation if is_picture(self._game.observation_space) else self._game.render(), text]

    def close(self) -> None:  # type: ignore[override]
        if self._game is not None:
            self._game.close()
            self._game = None


class GymnasiumText(EnvSpec):
    """Makes the games; demonstrates those with known transitions."""

    env_class = GymnasiumTextEnv
    Config = GymnasiumTextConfig
    config: GymnasiumTextConfig

    _render_mode: dict[str, str] | None = None

    async def setup(self) -> None:
        await asyncio.to_thread(self._try_out)

    def tasks(self, split: str) -> TaskSet:
        if self.config.map_size is not None:
            return frozen_lake_maps(split, self.config.map_size)
        return super().tasks(split)

    def new_game(self, task: Task) -> gymnasium.Env[Any, Any]:
        """A new instance of the game, with text rendering if it has one. Raises an `EnvgymError` if there is none."""
        with needs("gymnasium", "gymnasium", f"environment {self.id}"):
            import gymnasium
        name, kwargs = self.config.game, dict(self.config.kwargs)
        if "map" in task.fields:
            kwargs["desc"] = task.fields["map"]
        try:
            if self._render_mode is None:  # only an instance shows what the class renders
                with contextlib.closing(gymnasium.make(name, disable_env_checker=True, **kwargs)) as game:
                    self._render_mode = self._choose_render_mode(game)
            return gymnasium.make(name, disable_env_checker=True, **(self._render_mode | kwargs))
        except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound) as error:
            raise NameNotFound(f"{self.id}: {_line(error)}") from None
        except gymnasium.error.VersionNotFound as error:
            raise VersionNotFound(f"{self.id}: {_line(error)}") from None
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"{self.id}: {name} cannot be made: {_line(error)}") from None

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The shortest actions to the best end, in the words of the game; `seed` chooses among the shortest.

        Raises `ConfigError` for a game of chance (slippery ice, rain).
        """
        with contextlib.closing(self.new_game(task)) as game:
            game.reset(seed=task.seed)
            actions = shortest_actions(game.unwrapped, random.Random(f"{task.id} {seed}"))
            if actions is None:
                return super().demonstrations(task, seed)
            view = view_of(game)
            return [view.write(action) for action in actions[: self.config.max_turns]]

    def _choose_render_mode(self, game: gymnasium.Env[Any, Any]) -> dict[str, str]:
        """The argument that makes it render what the policy is shown. Raises `ConfigError` if it has no picture."""
        modes = game.metadata.get("render_modes") or ()
        if self.config.observation == "text":
            return {"render_mode": "ansi"} if "ansi" in modes else {}
        if is_picture(game.observation_space):
            return {}
        if "rgb_array" not in modes:
            raise ConfigError(f"{self.id}: {self.config.game} has no render mode rgb_array: set env.observation=text")
        return {"render_mode": "rgb_array"}

    def _try_out(self) -> None:
        """Make an instance once. Raises `EnvgymError` if its observations or actions cannot be shown or written."""
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are drawn in memory, on machines without a screen
        game = self.new_game(Task("trial"))
        try:
            view_of(game)
            if game.render_mode != "ansi" and self.config.observation != "image":
                check_writable(game.observation_space)
            if game.render_mode == "rgb_array":
                game.reset()
                game.render()
        except Exception as error:
            if not isinstance(error, ConfigError) and type(error).__name__ != "DependencyNotInstalled":
                raise
            raise ConfigError(f"{self.id}: {self.config.game}: {_line(error)}") from None
        finally:
            game.close()


def _line(error: BaseException) -> str:
    """An error's message as one line."""
    return " ".join(str(error).split()) or type(error).__name__
