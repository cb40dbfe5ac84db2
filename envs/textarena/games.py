"""TextArena's games, in a process of their own (the class that `Processes` hosts); one process holds many.

TextArena seeds Python's global generator when a game starts and draws from it at every move, some games from NumPy's
as well. Here each game has its own state of both, put in place around every call: games in one process do not meet,
and the generators of the run are never touched. What a game's library prints or downloads stays out of the run, too.
"""

from __future__ import annotations

import copy
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from envgym.errors import ConfigError, EnvgymError, NameNotFound, did_you_mean, needs

MOST_PLAYERS = 15
TRIALS = 300
"""Moves that are tried out in search of a legal one."""
DRAWS = 400
"""Variations of a game's examples that are made."""

MOVE_CHARACTERS = 4000
"""Characters of a move that a game reads, the last ones: many take quadratic time, and fail on numbers of more digits
than Python reads."""
MOVE_SECONDS = 2.0
"""CPU time that a game may take for one move; the other games of the process wait for it."""

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_ROLES = re.compile(r"\[(?:Player \d+|GAME|Game)\]")
_OFFERED = re.compile(r"(?:available|valid|legal|possible|playable|options)[^\n]*", re.IGNORECASE)
_VARIABLE = re.compile(
    r"(?P<squares>(?<![a-z0-9])(?:[a-j]\d)+(?![a-z0-9]))|\d+|<[^<>]+>|\b(?-i:[A-Z])\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Position:
    """The state of a game: whose turn it is, and the messages to that player since their last move.

    At the end `seen` is for the policy's seat; `rewards` by seat, and `lost_by_invalid` the seats that a move
    against the rules has cost the game.
    """

    player: int
    seen: str
    done: bool = False
    rewards: dict[int, float] = field(default_factory=dict)
    lost_by_invalid: tuple[int, ...] = ()


@dataclass(slots=True)
class Game:
    """One game under way."""

    env: Any
    seat: int
    generators: tuple[Any, Any]
    """The states of Python's and NumPy's global generators that belong to it."""
    rng: random.Random
    """For moves of the built-in opponent."""
    seen: dict[int, str] = field(default_factory=dict)
    """All messages to each seat."""

    @property
    def world(self) -> Any:
        """The game within its wrappers. Its action wrappers are used; observations are taken from itself, as those of
        wrappers repeat the whole conversation at every move."""
        world = self.env
        while "env" in vars(world):
            world = world.env
        return world


class Games:
    """Plays games of one id. `players` is their number; None finds one the game accepts.

    Raises `NameNotFound` and `ConfigError` for a game that is not there or cannot be made.
    """

    def __init__(self, name: str, players: int | None) -> None:
        with needs("textarena", "textarena", "TextArena"):
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        if name not in ENV_REGISTRY:
            raise NameNotFound(f"TextArena has no game {name!r}.{did_you_mean(name, ENV_REGISTRY)}")
        self._make = textarena.make
        self._name = name
        self._games: dict[str, Game] = {}
        self.players = self._accepted(players)

    def number_of_players(self) -> int:
        return self.players

    def start(self, key: str, seat: int, seed: int) -> Position:
        """Begin game `key` with the policy on `seat`."""
        import numpy as np

        before = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        game = Game(self._make(self._name), seat, before, random.Random(f"opponent {seed}"))
        game.env.reset(num_players=self.players, seed=seed)
        game.generators = random.getstate(), np.random.get_state()
        self._games[key] = game
        return self._position(game)

    def play(self, key: str, move: str) -> Position:
        """Play a move for whose turn it is; one that takes the game too long is an empty one."""
        game = self._games[key]
        with _own_generators(game):
            try:
                with _cpu_limit(MOVE_SECONDS):
                    done, _ = game.env.step(move[-MOVE_CHARACTERS:])
            except TimeoutError:
                done, _ = game.env.step("")
            return self._ended(game) if done else self._position(game)

    def random_move(self, key: str) -> str:
        """A legal move drawn at random for whose turn it is, or one that may not be legal where none is found."""
        game = self._games[key]
        seen = game.seen[game.world.state.current_player_id]
        moves = candidates(seen, game.rng)
        for move in moves[:TRIALS]:
            if _is_legal(game, move):
                return move
        return moves[0] if moves else "[pass]"

    def end(self, key: str) -> None:
        """Forget game `key`."""
        self._games.pop(key, None)

    def _accepted(self, players: int | None) -> int:
        """The number of players: the one asked for, or two, or one, or the fewest the game accepts."""
        refusal = ""
        for number in [players] if players is not None else [2, 1, *range(3, MOST_PLAYERS + 1)]:
            try:
                self._make(self._name).reset(num_players=number, seed=0)
            except SyntaxError as error:
                raise ConfigError(f"{self._name} needs a newer version of Python: {error}") from None
            except LookupError as error:
                if "nltk" not in str(error):
                    raise
                raise ConfigError(
                    f"{self._name} needs word lists that are not here: "
                    "python -m nltk.downloader words averaged_perceptron_tagger_eng"
                ) from None
            except (AssertionError, ValueError, ImportError, OSError) as error:
                refusal = " ".join(str(error).split())
            else:
                return number
        wanted = f"with {players} players " if players is not None else ""
        raise ConfigError(f"{self._name} cannot be played {wanted}here: {refusal}")

    def _position(self, game: Game) -> Position:
        player, observations = game.world.get_observation()
        return Position(player, self._tell(game, player, observations))

    def _ended(self, game: Game) -> Position:
        rewards, info = game.env.close()
        seen = self._tell(game, game.seat, game.world.state.observations.get(game.seat, []))
        reason = str(info.get(game.seat, {}).get("reason") or "")
        if reason not in seen:
            seen = f"{seen}\n{reason}".strip()
        lost = tuple(seat for seat, notes in info.items() if notes.get("invalid_move"))
        return Position(game.seat, seen, True, {seat: float(reward) for seat, reward in (rewards or {}).items()}, lost)

    def _tell(self, game: Game, player: int, observations: Any) -> str:
        """The messages to a player as text, without the player's own moves and with the last of several boards."""
        names = game.world.state.role_mapping
        boards = [index for index, (_, _, kind) in enumerate(observations) if getattr(kind, "name", "") == "GAME_BOARD"]
        lines = [
            message if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {message}"
            for index, (sender, message, _) in enumerate(observations)
            if sender != player and index not in boards[:-1]
        ]
        text = "\n".join(line.strip("\n") for line in lines)
        game.seen[player] = f"{game.seen.get(player, '')}\n{text}"
        return text


@contextmanager
def _own_generators(game: Game) -> Iterator[None]:
    import numpy as np

    random.setstate(game.generators[0])
    np.random.set_state(game.generators[1])
    try:
        yield
    finally:
        game.generators = random.getstate(), np.random.get_state()


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` within, once it has taken `seconds` of CPU time, also in a regular expression."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _is_legal(game: Game, move: str) -> bool:
    """True if the game accepts a move: it is played in a copy."""
    trial = copy.copy(game)
    trial.env = copy.deepcopy(game.env)
    state = trial.world.state
    player, errors = state.current_player_id, getattr(state, "error_count", 0)
    try:
        with _own_generators(trial):
            trial.env.step(move)
    except EnvgymError:
        raise
    except Exception:  # games have bugs; this move meets one
        return False
    if state.game_info[player].get("invalid_move"):
        return False
    return bool(getattr(state, "error_count", 0) <= errors)


def candidates(seen: str, rng: random.Random) -> list[str]:
    """Moves to try, in a random order: those a game offers at the moment first, then those that resemble examples."""
    offers = [line for line in _OFFERED.findall(seen) if _BRACKETS.search(line)]
    offered = _examples(offers[-1]) if offers else []
    examples = _examples(seen)
    rest = examples + [varied(rng.choice(examples), rng) for _ in range(DRAWS if examples else 0)]
    rng.shuffle(offered)
    rng.shuffle(rest)
    return list(dict.fromkeys(offered + rest))


def varied(example: str, rng: random.Random) -> str:
    """A move of the form of an example, with other numbers, squares (`e2e4`) and values for placeholders (`X`)."""
    largest, side = rng.choice((3, 9, 20)), rng.choice((5, 8, 10))
    return _VARIABLE.sub(
        lambda match: _squares(match[0], side, rng) if match["squares"] else str(rng.randint(0, largest)), example
    )


def _squares(text: str, side: int, rng: random.Random) -> str:
    """As many squares of a board as `text` names, each near the one before, as most moves go."""
    column, row = rng.randrange(side), rng.randrange(side)
    first, squares = rng.randint(0, 1), []
    for _ in range(len(text) // 2):
        squares.append(f"{'abcdefghij'[column]}{row + first}")
        column = min(max(column + rng.randint(-2, 2), 0), side - 1)
        row = min(max(row + rng.randint(-2, 2), 0), side - 1)
    return "".join(squares) if text.islower() else "".join(squares).upper()


def _examples(text: str) -> list[str]:
    """The different texts in brackets, without those that name who is speaking."""
    return [move for move in dict.fromkeys(_BRACKETS.findall(text)) if not _ROLES.fullmatch(move)]
