"""Reading answers: what was boxed, what the reference says, and what can be judged without algebra."""

from __future__ import annotations

import re

from . import forms, numerals

MAX_ANSWER_LENGTH = 1000
"""Characters of an answer that is still parsed; what is longer equals only the same text."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of a set, not braces of the box
_PERCENT = re.compile(r"%|\bper ?cent")
# A factorial, a very long number, an exponent that is more than a few characters or has one of its own.
_COSTLY = re.compile(r"!|[0-9]{30}|(?:\^|\*\*)(?!\s*(?:-?\w{1,3}|\{-?\w{1,3}\})(?![\w{]|\s*(?:\^|\*\*)))")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, or None where there is none, it is empty, or it never closes."""
    start = text.rfind(r"\boxed")
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[opening.end() : brace.start()].strip() or None
    return None


def reference(answer: object) -> str:
    """The final answer within a task's answer: after GSM8K's `####`, or in a box, or all of it."""
    text = str(answer)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return boxed(text) or text.strip()


def judge_at_once(answer: str, gold: str, problem: str = "") -> bool | None:
    """The verdict on `answer` where the text is enough for one, else None: then the mathematics decides.

    Where the reference is a number, an answer is one too. What stands in the problem is right only in the form that
    the reference has, so that nothing is earned by copying what was to be computed, simplified or converted.
    """
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return False
    right = numerals.read(gold)
    if right is None:
        return None if forms.alike(answer, gold) and not forms.copied(answer, gold, problem) else False
    number = numerals.read(answer)
    if number is None or not numerals.agree(number, right, percent=_PERCENT.search(problem) is not None):
        return False
    return number.form == right.form or not forms.stands_in(problem, number.written)


def looks_costly(answer: str) -> bool:
    """True for an answer that may take long to grade. A guess that decides only which queue an answer waits in."""
    return len(answer) > 200 or _COSTLY.search(answer) is not None
