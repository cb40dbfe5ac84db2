"""Reading a judge's reply. What is not certainly a grade is none: never a guess, never a zero."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PLAIN_SCORE = re.compile(
    r"[*_#>\s]*(?:(?:(?:final|overall)\s+)?(?:score|grade)[*_\s]*[:=]?[*_\s]*)?"
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
    """The grade in a reply: the last JSON object with a `score`, or a last line that is a number (`Score: 7/10`)."""
    score = _last_value(reply, "score")
    if score is None:
        lines = [line.strip() for line in reply.splitlines() if line.strip()]
        match = _PLAIN_SCORE.fullmatch(lines[-1]) if lines and len(lines[-1]) <= LONGEST_LINE else None
        if match is None or (match[2] is not None and float(match[2]) != highest):
            return None
        score = float(match[1])
    if isinstance(score, str) and re.fullmatch(r"-?\d+(\.\d+)?", score):
        score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float) or not lowest <= score <= highest:
        return None
    return float(score)


def ranking_in(reply: str, count: int) -> list[int] | None:
    """The order in a reply, best first: the last JSON object with a `ranking` that has each number once."""
    ranking = _last_value(reply, "ranking")
    if not isinstance(ranking, list) or any(type(number) is not int for number in ranking):
        return None
    return ranking if sorted(ranking) == list(range(1, count + 1)) else None


def _last_value(reply: str, key: str) -> Any:
    """The value of `key` in the last JSON object that has it: what comes before may quote the answer."""
    value, start = None, reply.find("{")
    while start >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            value = found.get(key, value)
        start = reply.find("{", end)
    return value
