"""TextArena's games, in a separate process (the class that `Processes` hosts); one process holds many.

TextArena seeds Python's global generator when a game starts and draws from it at every move; some games use NumPy's as
well. Here each game has its own state of both, set around every call: games in one process do not disturb each other,
and the run's generators are never touched. Output and downloads of a game's library stay out of the run, too.
"""

from __future__ import annotations

import copy
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from envgym.errors import ConfigError, EnvgymError, NameNotFound, did_you_mean, needs

MOST_PLAYERS = 15
TRIALS = 300
"""Maximum moves to try in search of a legal one."""
DRAWS = 400
"""Variations to draw from a game's examples."""

MOVE_CHARACTERS = 4000
"""Last characters of a move that a game reads: many games take quadratic time, and fail on numbers with more digits
than Python parses."""
MOVE_SECONDS = 2.0
"""CPU seconds that a game may take per move; the other games of the process wait for it."""

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_ROLES = re.compile(r"\[(?:Player \d+|GAME|Game)\]")
_OFFERED = re.compile(r"(?:available|valid|legal|possible|playable|options)[^\n]*", re.IGNORECASE)
_VARIED = re.compile(r"(?P<squares>(?<![a-z0-9])(?:[a-j]\d)+(?![a-z0-9]))|\d+|<[^<>]+>|\b(?-i:[A-Z])\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Position:
    """The state of a game: whose turn it is, and the messages to that player since their last move.

    At the end `text` is for the policy's seat, `rewards` are by seat, and `invalid_seats` have lost by a move against
    the rules.
    """

    player: int
    text: str
    is_over: bool = False
    rewards: dict[int, float] = field(default_factory=dict)
    invalid_seats: tuple[int, ...] = ()


@dataclass(slots=True)
class Game:
    """One game in progress."""

    env: Any
    seat: int
    generators: tuple[Any, Any]
    """The game's states of Python's and NumPy's global generators."""
    rng: random.Random
    """Generator for the moves of the built-in opponent."""
    transcripts: dict[int, str] = field(default_factory=dict)
    """All messages to each seat."""

    @property
    def world(self) -> Any:
        """The unwrapped game. Actions go through the wrappers; observations come from the game itself, since the
        wrappers repeat the whole conversation at every move."""
        world = self.env
        while "env" in vars(world):
            world = world.env
        return world


class Games:
    """Plays games of one id. `players` is the number of players; None finds one that the game accepts.

    Raises `NameNotFound` for an unknown game, and `ConfigError` for one that cannot be made.
    """

    def __init__(self, name: str, players: int | None) -> None:
        with needs("textarena", "textarena", "TextArena"):
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        if name not in ENV_REGISTRY:
            raise NameNotFound(f"TextArena has no game {name!r}.{did_you_mean(name, ENV_REGISTRY)}")
        _sort_arguments(textarena.SinglePlayerState)
        self._make = textarena.make
        self._name = name
        self._games: dict[str, Game] = {}
        self.n_players = self._find_n_players(players)

    def number_of_players(self) -> int:
        return self.n_players

    def start(self, key: str, seat: int, seed: int) -> Position:
        """Start game `key` with the policy on `seat`."""
        import numpy as np

        generators = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        game = Game(self._make(self._name), seat, generators, random.Random(f"opponent {seed}"))
        game.env.reset(num_players=self.n_players, seed=seed)
        game.generators = random.getstate(), np.random.get_state()
        self._games[key] = game
        return self._position(game)

    def play(self, key: str, move: str) -> Position:
        """Play a move of the current player. A move that takes the game too long is replaced by an empty one."""
        game = self._games[key]
        with _generators_of(game):
            try:
                with _cpu_limit(MOVE_SECONDS):
                    is_over, _ = game.env.step(move[-MOVE_CHARACTERS:])
            except TimeoutError:
                is_over, _ = game.env.step("")
            return self._final_position(game) if is_over else self._position(game)

    def random_move(self, key: str) -> str:
        """A legal move of the current player, drawn at random; if none is found, a move that may not be legal."""
        game = self._games[key]
        transcript = game.transcripts[game.world.state.current_player_id]
        moves = candidates(transcript, game.rng)
        for move in moves[:TRIALS]:
            if _is_legal(game, move):
                return move
        return moves[0] if moves else "[pass]"

    def end(self, key: str) -> None:
        """Forget game `key`."""
        self._games.pop(key, None)

    def _find_n_players(self, players: int | None) -> int:
        """The given number of players, or two, or one, or the fewest that the game accepts. Raises `ConfigError` if it
        cannot be played."""
        reason = ""
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
                reason = " ".join(str(error).split())
            else:
                return number
        count = f"with {players} players " if players is not None else ""
        raise ConfigError(f"{self._name} cannot be played {count}here: {reason}")

    def _position(self, game: Game) -> Position:
        player, observations = game.world.get_observation()
        return Position(player, self._new_messages(game, player, observations))

    def _final_position(self, game: Game) -> Position:
        """Close the game; its end with rewards, and the seats that lost by an invalid move."""
        rewards, info = game.env.close()
        text = self._new_messages(game, game.seat, game.world.state.observations.get(game.seat, []))
        reason = str(info.get(game.seat, {}).get("reason") or "")
        if reason not in text:
            text = f"{text}\n{reason}".strip()
        rewards = {seat: float(reward) for seat, reward in (rewards or {}).items()}
        invalid_seats = tuple(seat for seat, notes in info.items() if notes.get("invalid_move"))
        return Position(game.seat, text, True, rewards, invalid_seats)

    def _new_messages(self, game: Game, player: int, observations: Any) -> str:
        """The messages to a player as text, without the player's own moves and all boards but the last. Adds the text
        to the player's transcript."""
        names = game.world.state.role_mapping
        boards = [index for index, (_, _, kind) in enumerate(observations) if getattr(kind, "name", "") == "GAME_BOARD"]
        lines = [
            message if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {message}"
            for index, (sender, message, _) in enumerate(observations)
            if sender != player and index not in boards[:-1]
        ]
        text = "\n".join(line.strip("\n") for line in lines)
        game.transcripts[player] = f"{game.transcripts.get(player, '')}\n{text}"
        return text


@cache
def _sort_arguments(state: Any) -> None:
    """Some games (ThreeCardMonte) pass the reward of an invalid move before its reason. The state then takes the text
    as the reward, and no one knows who has lost."""
    set_invalid_move = state.set_invalid_move

    def set_by_kind(self: Any, reason: Any, reward: Any = -1.0) -> None:
        set_invalid_move(self, *((reward, reason) if isinstance(reward, str) else (reason, reward)))

    state.set_invalid_move = set_by_kind


@contextmanager
def _generators_of(game: Game) -> Iterator[None]:
    """Set the global generators to the game's states, and store them at the end."""
    import numpy as np

    random.setstate(game.generators[0])
    np.random.set_state(game.generators[1])
    try:
        yield
    finally:
        game.generators = random.getstate(), np.random.get_state()


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the block once it has taken `seconds` of CPU time, even inside a regular expression."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _is_legal(game: Game, move: str) -> bool:
    """True if a copy of the game accepts the move."""
    trial = copy.copy(game)
    trial.env = copy.deepcopy(game.env)
    state = trial.world.state
    player, errors = state.current_player_id, getattr(state, "error_count", 0)
    try:
        with _generators_of(trial):
            trial.env.step(move)
    except EnvgymError:
        raise
    except Exception:  # a bug of the game that this move meets
        return False
    if state.game_info[player].get("invalid_move"):
        return False
    return bool(getattr(state, "error_count", 0) <= errors)


def candidates(transcript: str, rng: random.Random) -> list[str]:
    """Moves to try, in random order: first those that the game offers now, then variations of its examples."""
    offers = [line for line in _OFFERED.findall(transcript) if _BRACKETS.search(line)]
    offered = _examples(offers[-1]) if offers else []
    examples = _examples(transcript)
    variations = examples + [vary(rng.choice(examples), rng) for _ in range(DRAWS if examples else 0)]
    rng.shuffle(offered)
    rng.shuffle(variations)
    return list(dict.fromkeys(offered + variations))


def vary(example: str, rng: random.Random) -> str:
    """A move of the form of an example, with other numbers, squares (`e2e4`) and values for placeholders (`X`)."""
    limit, side = rng.choice((3, 9, 20)), rng.choice((5, 8, 10))
    return _VARIED.sub(
        lambda match: _squares(match[0], side, rng) if match["squares"] else str(rng.randint(0, limit)), example
    )


def _squares(text: str, side: int, rng: random.Random) -> str:
    """Draw as many squares of a board as `text` names, each near the previous one, as in most moves."""
    column, row = rng.randrange(side), rng.randrange(side)
    first, squares = rng.randint(0, 1), []
    for _ in range(len(text) // 2):
        squares.append(f"{'abcdefghij'[column]}{row + first}")
        column = min(max(column + rng.randint(-2, 2), 0), side - 1)
        row = min(max(row + rng.randint(-2, 2), 0), side - 1)
    return "".join(squares) if text.islower() else "".join(squares).upper()


def _examples(text: str) -> list[str]:
    """The distinct texts in brackets, without the names of speakers."""
    return [move for move in dict.fromkeys(_BRACKETS.findall(text)) if not _ROLES.fullmatch(move)]
