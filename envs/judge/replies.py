"""Replies of the judge: the grade or the ranking at the end of one. An ambiguous reply has none: never a guess or a
zero."""

from __future__ import annotations

import json
import re
from typing import Any

_MARKUP = " \t\r\n`*_"


def score_in(reply: str, lowest: float, highest: float) -> float | None:
    """The grade at the end of a reply: a JSON object with a `score` (see `_final_value`)."""
    score = _final_value(reply, "score")
    if isinstance(score, str) and re.fullmatch(r"-?\d+(\.\d+)?", score):
        score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float) or not lowest <= score <= highest:
        return None
    return float(score)


def ranking_in(reply: str, count: int) -> list[int] | None:
    """The ranking at the end of a reply, best first: a JSON object with a `ranking` (see `_final_value`) that has each
    number once."""
    ranking = _final_value(reply, "ranking")
    if not isinstance(ranking, list) or any(type(number) is not int for number in ranking):
        return None
    return ranking if sorted(ranking) == list(range(1, count + 1)) else None


def _final_value(reply: str, key: str) -> Any:
    """The value of `key` in the JSON object at the end of a reply, alone on its lines as the prompt asks. None without
    such an object, with text after it, or with another value in an earlier one: a judge may quote an answer that wants
    to dictate its grade."""
    values, last, start = [], 0, reply.find("{")
    while start >= 0:
        try:
            fields, end = json.JSONDecoder().raw_decode(reply, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            line_start, line_end = reply[:start].rpartition("\n")[2], reply[end:].partition("\n")[0]
            if key in fields and not (line_start + line_end).strip(_MARKUP):
                values.append(fields[key])
                last = end
        start = reply.find("{", end)
    if not values or reply[last:].strip(_MARKUP) or any(value != values[0] for value in values):
        return None
    return values[0]
