"""Replies of the judge, and the grade or the ranking that one ends with. Anything but a certain one is none: never a
guess or a zero."""

from __future__ import annotations

import json
import re
from typing import Any

_MARKUP = " \t\r\n`*_"


def score_in(reply: str, lowest: float, highest: float) -> float | None:
    """The grade that a reply ends with: a JSON object with a `score` (see `_own`)."""
    score = _own(reply, "score")
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
    no such object is there, anything follows it, or another says something else: a judge may quote what the answer
    wants it to say."""
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
    if not values or reply[last:].strip(_MARKUP) or any(value != values[0] for value in values):
        return None
    return values[0]
