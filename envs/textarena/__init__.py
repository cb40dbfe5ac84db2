"""Games of TextArena: the policy plays one seat, an opponent plays the others."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes.pool import Processes, ProcessSession
from envgym.services import ChatOrPolicy, Service
from envgym.types import Action, Message

from .games import Games, Position

GAMES_CLASS = "envgym.envs.textarena.games:Games"
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment of the processes: some games shuffle the elements of sets of strings."""
STARTS = 5
"""Maximum starts of a game that the opponent loses before the policy's first turn."""


class TextArenaConfig(EnvConfig):
    """Settings of the environment."""

    game: str = "TicTacToe-v0"
    """TextArena's id of the game."""
    players: int | None = Field(None, ge=1)
    """Number of players. Unset: two, or one, or the fewest the game accepts."""
    seat: int | None = Field(None, ge=0)
    """The policy's seat, from 0; often the one that moves first. Unset: drawn by the task's seed."""
    opponent: Literal["random"] | ChatOrPolicy = "random"
    """The player of the other seats: `random`, legal moves drawn at random, as far as they can be found; `policy`, the
    policy in training; or a model behind an API (`{base_url: …, model: …}`)."""
    opponent_max_tokens: int = Field(512, ge=1)
    """Maximum tokens of a model's move."""
    opponent_temperature: float = Field(1.0, ge=0)
    """Temperature at which a model's moves are sampled."""
    max_turns: int = Field(100, ge=1)
    """Moves of the policy after which an episode is truncated, without a reward. The game's own limit holds as
    well."""
    processes: int = Field(2, ge=1)
    """Processes that run the games; each holds many."""


class TextArenaEnv(Env):
    """A game of TextArena: the reward comes at its end, from -1 for a loss to 1 for a win."""

    spec: TextArenaGame
    config: TextArenaConfig

    _session: ProcessSession[Games] | None = None
    _key = ""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self.close()
        seed = self.rng.getrandbits(31) if seed is None else seed
        seat = self.config.seat
        self._seat = random.Random(f"seat {seed}").randrange(self.spec.n_players) if seat is None else seat
        self._turns = 0
        self._session = await self.spec.processes.session()
        for start in range(STARTS):
            self._key = uuid.uuid4().hex
            self._conversations: dict[int, list[Message]] = {}
            game_seed = seed + start
            position = await self._game.run(lambda games: games.start(self._key, self._seat, game_seed))  # noqa: B023
            position = await self._play_opponents(position)
            if not position.is_over:
                return [replace(Message("user", position.text), from_others=True)], {}
            await self._game.run(lambda games: games.end(self._key))
        raise InvalidOutcome("opponent", "the opponent lost before the policy had a turn", retryable=True)

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        position = await self._play_opponents(await self._play(action.text))
        observation = [Message("user", position.text)]
        if not position.is_over:
            truncated = self._turns >= self.config.max_turns
            return observation, 0.0, False, truncated, {"metrics": {"turns": self._turns}}
        reward = position.rewards.get(self._seat, 0.0)
        metrics = {
            "turns": self._turns,
            "won": float(reward > 0),
            "lost_by_invalid_move": float(self._seat in position.invalid_seats),
            "won_by_invalid_move": float(reward > 0 and bool(set(position.invalid_seats) - {self._seat})),
            f"reward_seat_{self._seat}": reward,
        }
        return observation, reward, True, False, {"score": self._score(reward), "metrics": metrics}

    async def _play_opponents(self, position: Position) -> Position:
        """Let the other seats move until it is the policy's turn, or the game has ended."""
        while not position.is_over and position.player != self._seat:
            move = await self._opponent_move(position)
            position = await self._play(move)
        return position

    async def _opponent_move(self, position: Position) -> str:
        """A move of the opponent, which as a model has a conversation per seat."""
        config = self.config
        if config.opponent == "random":
            return await self._game.run(lambda games: games.random_move(self._key))
        conversation = self._conversations.setdefault(position.player, [])
        conversation.append(Message("user", position.text))
        sampling = {"max_tokens": config.opponent_max_tokens, "temperature": config.opponent_temperature}
        move = await self.spec.clients["opponent"].complete(conversation, **sampling, seed=self.rng.getrandbits(31))
        conversation.append(Message("assistant", move))
        return str(move)

    async def _play(self, text: str) -> Position:
        return await self._game.run(lambda games: games.play(self._key, without_thoughts(text)))

    @property
    def _game(self) -> ProcessSession[Games]:
        """The session in the process that holds the game."""
        assert self._session is not None  # a reset came first
        return self._session

    async def close(self) -> None:
        """End the game."""
        session, self._session = self._session, None
        if session is not None:
            await session.close(lambda: session.run(lambda games: games.end(self._key)))

    def _score(self, reward: float) -> float:
        """1 for a win, 0 for a loss; in a game for one player the reward itself, clipped to [0, 1]."""
        bounded = min(max(reward, -1.0), 1.0)
        return max(bounded, 0.0) if self.spec.n_players == 1 else (bounded + 1) / 2


class TextArenaGame(EnvSpec):
    """The processes that hold the games."""

    env_class = TextArenaEnv
    Config = TextArenaConfig
    config: TextArenaConfig

    processes: Processes[Games]
    n_players: int

    @property
    def services(self) -> Mapping[str, Service]:
        return {} if self.config.opponent == "random" else {"opponent": self.config.opponent}

    async def setup(self) -> None:
        """Start the processes that hold the games, and check the policy's seat (None: drawn for each task)."""
        config = self.config
        settings = {"name": config.game, "players": config.players}
        self.processes = Processes(GAMES_CLASS, settings, count=config.processes, name="textarena", environ=SAME_HASHES)
        await self.processes.start()
        self.closing.push_async_callback(self.processes.close)
        self.n_players = await self.processes.run(lambda games: games.number_of_players(), timeout=config.call_timeout)
        if config.seat is not None and config.seat >= self.n_players:
            raise ConfigError(f"{self.id}: {config.game} has the seats 0 to {self.n_players - 1}, not {config.seat}")


def without_thoughts(text: str) -> str:
    """The answer without the thoughts before it: they hold moves that were not made, and TextArena would show them to
    the other players."""
    if "</think>" in text:
        return text.rpartition("</think>")[2].strip()
    return text.partition("<think>")[0].strip()
