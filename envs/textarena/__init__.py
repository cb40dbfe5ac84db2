"""Games of TextArena: the policy plays one seat, an opponent plays the others."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult
from envgym.errors import ConfigError, EnvgymError, InvalidOutcome
from envgym.processes.pool import Processes, Session
from envgym.services import ChatOrPolicy, Service
from envgym.types import Action, Message

from .games import Position

HOST = "envgym.envs.textarena.games:Games"
STARTS = 5
"""Times a game is begun anew that an opponent loses before the policy has had a turn."""


class TextArenaConfig(EnvConfig):
    """Settings of the environment."""

    game: str = "TicTacToe-v0"
    """TextArena's id of the game."""
    players: int | None = Field(None, ge=1)
    """Number of players. Unset: two, or one, or the fewest the game accepts."""
    seat: int | None = Field(None, ge=0)
    """The policy's seat, from 0; who has it often moves first. Unset: drawn by the task's seed."""
    opponent: Literal["random"] | ChatOrPolicy = "random"
    """The player of the other seats: `random`, legal moves drawn at random where they can be found out; `policy`, the
    policy in training; or a model behind an API (`{base_url: …, model: …}`)."""
    opponent_max_tokens: int = Field(512, ge=1)
    """Tokens a model has for one move."""
    opponent_temperature: float = Field(1.0, ge=0)
    """Temperature at which a model's moves are sampled."""
    max_turns: int = Field(100, ge=1)
    """Moves of the policy after which an episode ends, truncated, without a reward. The game's own limit holds beside
    it."""
    processes: int = Field(2, ge=1)
    """Processes that the games are played in; each holds many."""

    @model_validator(mode="after")
    def _check(self) -> TextArenaConfig:
        if self.seat is not None and self.players is not None and self.seat >= self.players:
            raise ValueError(f"seat is from 0 to {self.players - 1} with {self.players} players, not {self.seat}")
        return self


class TextArenaEnv(Env):
    """A game of TextArena: pays at its end, from -1 for a loss to 1 for a win."""

    spec: TextArenaGame

    _session: Session | None = None
    _key = ""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self.close()
        spec = self.spec
        seed = self.rng.getrandbits(31) if seed is None else seed
        seat = spec.config.seat
        self._seat = random.Random(f"seat {seed}").randrange(spec.players) if seat is None else seat
        self._turns = 0
        self._session = await spec.games.session()
        for start in range(STARTS):
            self._key = uuid.uuid4().hex
            self._talks: dict[int, list[Message]] = {}
            position = await self._call("start", self._seat, seed + start)
            position = await self._others_play(position)
            if not position.done:
                return [replace(Message.of("user", position.seen), from_others=True)], {}
            await self._call("end")
        raise InvalidOutcome("opponent", "the opponent lost before the policy had a turn", retryable=True)

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        position = await self._others_play(await self._play(action.text))
        observation = [Message.of("user", position.seen)]
        if not position.done:
            truncated = self._turns >= self.spec.config.max_turns
            return observation, 0.0, False, truncated, {"metrics": {"turns": self._turns}}
        reward = position.rewards.get(self._seat, 0.0)
        metrics = {
            "turns": self._turns,
            "won": float(reward > 0),
            "lost_by_invalid_move": float(self._seat in position.lost_by_invalid),
            "won_by_invalid_move": float(reward > 0 and bool(set(position.lost_by_invalid) - {self._seat})),
            f"reward_seat_{self._seat}": reward,
        }
        return observation, reward, True, False, {"score": self._score(reward), "metrics": metrics}

    async def _others_play(self, position: Position) -> Position:
        """Let the other seats move until it is the policy's turn, or the game has ended."""
        while not position.done and position.player != self._seat:
            move = await self._opponents_move(position)
            position = await self._play(move)
        return position

    async def _opponents_move(self, position: Position) -> str:
        config = self.spec.config
        if config.opponent == "random":
            return str(await self._call("random_move"))
        talk = self._talks.setdefault(position.player, [])
        talk.append(Message.of("user", position.seen))
        move = await self.spec.clients["opponent"].complete(
            talk,
            max_tokens=config.opponent_max_tokens,
            temperature=config.opponent_temperature,
            seed=self.rng.getrandbits(31),
        )
        talk.append(Message.of("assistant", move))
        return str(move)

    async def _play(self, text: str) -> Position:
        position: Position = await self._call("play", spoken(text))
        return position

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the process that holds the game."""
        assert self._session is not None  # a reset came first
        return await self._session.call(method, self._key, *args)

    async def close(self) -> None:
        """Give the game up."""
        if self._session is not None:
            with contextlib.suppress(EnvgymError):  # where the process is gone, the game is as well
                if self._session.alive:
                    await self._call("end")
            self._session.end()
            self._session = None

    def _score(self, reward: float) -> float:
        """1 for a win and 0 for a loss; one who plays alone is paid shares of success as they are."""
        bounded = min(max(reward, -1.0), 1.0)
        return max(bounded, 0.0) if self.spec.players == 1 else (bounded + 1) / 2


class TextArenaGame(EnvSpec):
    """The processes that hold the games."""

    env_class = TextArenaEnv
    Config = TextArenaConfig
    config: TextArenaConfig

    games: Processes
    players: int

    @property
    def services(self) -> Mapping[str, Service]:
        return {} if self.config.opponent == "random" else {"opponent": self.config.opponent}

    async def setup(self) -> None:
        config = self.config
        self.games = Processes(
            HOST,
            {"name": config.game, "players": config.players},
            count=config.processes,
            name="textarena",
            environ={"PYTHONHASHSEED": "0"},  # some games shuffle what comes out of sets of strings
        )
        await self.games.start()
        self.closing.push_async_callback(self.games.close)
        self.players = await self.games.call("number_of_players", timeout=config.call_timeout)
        if config.seat is not None and config.seat >= self.players:
            raise ConfigError(f"{self.id}: {config.game} has the seats 0 to {self.players - 1}, not {config.seat}")


def spoken(text: str) -> str:
    """The words of an answer without the thoughts before them, which hold moves that were not made, and which TextArena
    would show the other players."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return text.partition("<think>")[0].strip()
