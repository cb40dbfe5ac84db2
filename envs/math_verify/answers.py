"""Answers as text: the content of the box, the reference answer, and the grades that need no algebra."""

from __future__ import annotations

import re

from . import forms, numerals
from .notation import plain

MAX_ANSWER_LENGTH = 1000
"""Characters of an answer up to which it is parsed; a longer one equals only the same text."""
MAX_JOINT = 40
"""Characters between two boxes that are one answer."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of a set, not braces of the box
_JOINT = re.compile(r"(?:[\s$]|\\[()]|[a-z]\s*=)*(?:,|,?\s*(?:and|or)\b)(?:[\s$]|\\[()]|[a-z]\s*=)*")
_PERCENT = re.compile(r"%|\bper ?cent")
# A factorial, a very long number, an exponent that is more than a few characters or has one of its own.
_COSTLY = re.compile(r"!|[0-9]{30}|(?:\^|\*\*)(?!\s*(?:-?\w{1,3}|\{-?\w{1,3}\})(?![\w{]|\s*(?:\^|\*\*)))")


def boxed(text: str, *, allow_several: bool = False) -> str | None:
    r"""The content of the last `\boxed{…}`, or None where there is none, it is empty, or it never closes.

    With `allow_several`, boxes joined by `and`, `or` and commas are one answer: `\boxed{2} and \boxed{3}` is `2, 3`.
    """
    contents: list[str] = []
    end = len(text)
    while (start := text.rfind(r"\boxed", 0, end)) >= 0:
        opening = _BOX.match(text, start)
        closing = _closing(text, opening.end()) if opening else None
        if opening is None or closing is None:
            break
        if contents and (end - closing > MAX_JOINT or not _JOINT.fullmatch(text, closing + 1, end)):
            break
        contents.insert(0, text[opening.end() : closing].strip())
        if not allow_several:
            break
        end = start
    return ", ".join(contents) or None


def _closing(text: str, start: int) -> int | None:
    """The position of the brace that closes the content from `start` on, or None."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def reference(answer: object) -> str:
    """The final answer in a task's reference answer: after GSM8K's `####`, or in a box, or all of it."""
    text = str(answer)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed(text) or text.strip()


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
        return forms.has_same_numbers(answer, gold, percent=percent) or None
    number = numerals.read(answer)
    if number is None or not numerals.agree(number, gold_number, percent=percent):
        return False
    return number.form == gold_number.form or not numerals.holds(plain(problem), number)


def looks_costly(answer: str) -> bool:
    """True for an answer that may take long to grade. A guess that decides only which queue an answer waits in."""
    return len(answer) > 200 or _COSTLY.search(answer) is not None
