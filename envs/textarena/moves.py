"""Guessing what may be played, from what a game says: it writes moves in square brackets and shows examples."""

from __future__ import annotations

import random
import re

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_ROLES = re.compile(r"\[(?:Player \d+|GAME|Game)\]")
_OFFERED = re.compile(r"(?:available|valid|legal|possible|playable|options)[^\n]*", re.IGNORECASE)
_VARIABLE = re.compile(
    r"(?P<squares>(?<![a-z0-9])(?:[a-j]\d)+(?![a-z0-9]))|\d+|<[^<>]+>|\b(?-i:[A-Z])\b", re.IGNORECASE
)

DRAWS = 400
"""Variations of a game's examples that are made."""


def candidates(told: str, rng: random.Random) -> list[str]:
    """Moves to try, in a random order: those a game offers at the moment first, then those that resemble examples."""
    offers = [line for line in _OFFERED.findall(told) if _BRACKETS.search(line)]
    offered = _examples(offers[-1]) if offers else []
    examples = _examples(told)
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
