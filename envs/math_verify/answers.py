"""Answers as text: the grades that need no algebra."""

from __future__ import annotations

import re

from . import forms, numerals
from .notation import plain

MAX_ANSWER_LENGTH = 1000
"""Characters of an answer up to which it is parsed; a longer one equals only the same text."""

_PERCENT = re.compile(r"%|\bper ?cent")
# A factorial, a very long number, an exponent that is more than a few characters or has one of its own.
_COSTLY = re.compile(r"!|[0-9]{30}|(?:\^|\*\*)(?!\s*(?:-?\w{1,3}|\{-?\w{1,3}\})(?![\w{]|\s*(?:\^|\*\*)))")


def grade_by_text(answer: str, gold: str, problem: str = "") -> bool | None:
    """The grade of `answer` where the text is enough for one, else None: then the mathematics decides.

    Where the reference is a number, the answer must be a number. An expression of the problem is right only in the
    form of the reference, so that copying what was to be computed, simplified or converted gets no reward.
    """
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return False
    answer, gold = plain(answer), plain(gold)
    gold_number = numerals.read(gold)
    percent = _PERCENT.search(problem) is not None
    if gold_number is None:
        if forms.has_same_words(answer, gold):
            return True
        if not forms.has_same_form(answer, gold) or forms.is_copied(answer, gold, problem):
            return False
        pairs = forms.number_pairs(answer, gold)
    else:
        number = numerals.read(answer)
        pairs = [] if number is None else [(number, gold_number)]
    if pairs and all(numerals.agree(*pair, percent=percent) for pair in pairs):
        return not any(numerals.is_copied(*pair, plain(problem)) for pair in pairs)
    return None if gold_number is None else False


def looks_costly(answer: str) -> bool:
    """True for an answer that may take long to grade. A guess that decides only which queue an answer waits in."""
    return len(answer) > 200 or _COSTLY.search(answer) is not None
