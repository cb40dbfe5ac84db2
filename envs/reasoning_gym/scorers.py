"""Scoring an answer as its dataset does, except where the dataset pays a wrong one in full."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .guard import answers_are_data

Entry = Mapping[str, Any]

_NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)


def scored(name: str, dataset: Any, answer: str, entry: Entry) -> float:
    """The score of `answer`, in [0, 1], by the scorer of dataset `name`, or by ours where that one is wrong."""
    if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(str(entry["answer"])):
        return 0.0  # no distance from it is large, and some scorers find it none
    scorer = CORRECTED.get(name, dataset.score_answer)
    try:
        with answers_are_data():
            score = float(scorer(answer, copy.deepcopy(entry)))  # some write into the entry
    except (Exception, SystemExit):  # whatever an answer brings a scorer to raise, it is not right
        return 0.0
    return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def _coin_flip(answer: str, entry: Entry) -> float:
    """The library's accepts every beginning of the right number: 0 for 0.25."""
    said, right = _fraction(answer), _fraction(entry["answer"])
    return float(abs(said - right) <= min(1e-4, 1e-2 * right))


def _game_of_life_halting(answer: str, entry: Entry) -> float:
    """The library's compares the truth of two strings, so that any answer is right."""
    return float(answer.strip().lower() == str(entry["answer"]).strip().lower())


def _puzzle24(answer: str, entry: Entry) -> float:
    """The library's accepts any four numbers, not only those given, and rounds: 6*4*1*1 is always right."""
    from sympy.parsing.sympy_parser import parse_expr

    given = sorted(entry["metadata"]["numbers"])
    if sorted(int(number) for number in re.findall(r"\d+", answer)) != given or re.search(r"[^\d\s+\-*/()]|//", answer):
        return 0.0
    return float(parse_expr(answer) == 24)


def _fraction(text: str) -> float:
    numerator, slash, denominator = text.replace(",", "").partition("/")
    return float(numerator) / float(denominator) if slash else float(numerator)


CORRECTED: Mapping[str, Callable[[str, Entry], float]] = {
    "coin_flip": _coin_flip,
    "game_of_life_halting": _game_of_life_halting,
    "puzzle24": _puzzle24,
}
