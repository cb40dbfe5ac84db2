"""Whether a final answer is right: the same number, the same text, or text that holds it."""

from __future__ import annotations

import math
import re
from typing import Literal

Match = Literal["auto", "number", "exact", "contains"]

_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def given(text: str, answer: object, match: Match) -> str | None:
    """What `text` gives as the answer where `is_right` compares it so; None where that is nothing."""
    said = text.rpartition("</think>")[2]
    if match == "number" or (match == "auto" and number(str(answer)) is not None):
        found = last_number(said)
        return None if found is None else f"{found:.12g}"
    return _plain(said) or None


def is_right(text: str, answer: object, match: Match) -> bool:
    """Whether `text` gives `answer`. `auto` compares numbers where the answer is one, else the whole text.

    `number`: the last number in the text equals the answer. `exact`: the same text, but for case, spacing and a full
    stop at the end. `contains`: the answer occurs in the text, as whole words. Thoughts before `</think>` do not count.
    """
    said = text.rpartition("</think>")[2]
    wanted = str(answer)
    if match == "auto":
        match = "exact" if number(wanted) is None else "number"
    if match == "number":
        right, given = number(wanted), last_number(said)
        return right is not None and given is not None and math.isclose(right, given, rel_tol=1e-9, abs_tol=1e-12)
    if match == "exact":
        return _plain(said) == _plain(wanted)
    return re.search(rf"(?<!\w){re.escape(_plain(wanted))}(?!\w)", _plain(said)) is not None


def number(text: str) -> float | None:
    """The number that `text` is, with or without thousands' commas; None where it is none."""
    text = text.strip()
    if not any(map(str.isdigit, text)) or not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", ""))


def last_number(text: str) -> float | None:
    """The last number in `text`."""
    found = [value for word in _NUMBER.findall(text) if (value := number(word)) is not None]
    return found[-1] if found else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".").rstrip()
