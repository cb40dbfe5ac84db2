"""Reading a judge's reply. Anything but a certain grade is none: never a guess, never a zero."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PLAIN_SCORE = re.compile(
    r"[*_#>\s]*((?:(?:final|overall)\s+)?(?:score|grade)[*_\s]*[:=]?[*_\s]*)?"
    r"(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?[*_.\s]*",
    re.IGNORECASE,
)
LONGEST_LINE = 100
"""Characters of a line that may be read as a plain score."""


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """`read` returns what a reply says, or None; `form` says how it should have been written."""

    read: Callable[[str], Any]
    form: str

    @property
    def reminder(self) -> str:
        return f"That cannot be read. Reply with nothing but one line of JSON: {self.form}."


def score_in(reply: str, lowest: float, highest: float) -> float | None:
    """The grade that a reply ends with: a JSON object with a `score` (see `_own`), or a line that is a number
    (`Score: 7/10`), where no line before says another."""
    score = _own(reply, "score")
    if score is None:
        return None
    if score is _MISSING:
        lines = [line.strip() for line in reply.splitlines() if line.strip()]
        matches = [_PLAIN_SCORE.fullmatch(line) for line in lines if len(line) <= LONGEST_LINE]
        match = _PLAIN_SCORE.fullmatch(lines[-1]) if lines and len(lines[-1]) <= LONGEST_LINE else None
        if match is None or (match[3] is not None and float(match[3]) != highest):
            return None
        if any(other is not None and other[1] and float(other[2]) != float(match[2]) for other in matches):
            return None
        score = float(match[2])
    if isinstance(score, str) and re.fullmatch(r"-?\d+(\.\d+)?", score):
        score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float) or not lowest <= score <= highest:
        return None
    return float(score)


def ranking_in(reply: str, count: int) -> list[int] | None:
    """The order that a reply ends with, best first: a JSON object with a `ranking` (see `_own`) that has each number
    once."""
    ranking = _own(reply, "ranking")
    if not isinstance(ranking, list) or any(type(number) is not int for number in ranking):
        return None
    return ranking if sorted(ranking) == list(range(1, count + 1)) else None


def _own(reply: str, key: str) -> Any:
    """The value of `key` in the JSON object that a reply ends with, alone on its lines as it was asked for. None where
    anything follows it, or another such object says something else: a judge may quote what the answer wants it to say.
    `_MISSING` where no such object is there."""
    values, last, start = [], 0, reply.find("{")
    while start >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            before, after = reply[:start].rpartition("\n")[2], reply[end:].partition("\n")[0]
            if key in found and not (before + after).strip(_MARKUP):
                values.append(found[key])
                last = end
        start = reply.find("{", end)
    if not values:
        return _MISSING
    if reply[last:].strip(_MARKUP) or any(value != values[0] for value in values):
        return None
    return values[0]


_MARKUP = " \t\r\n`*_"
_MISSING = object()
