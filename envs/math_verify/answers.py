"""Reading answers: what was boxed, what the reference says, and what can be judged without algebra."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER_LENGTH = 1000
"""Characters of an answer that is still parsed; what is longer equals only the same text."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # `\{` and `\}` are characters of a set, not braces of the box
_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?P<point>\.[0-9]+)?")
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


def judge_at_once(answer: str, gold: str) -> bool | None:
    """Whether `answer` is right where that is certain: the same text, or plain numbers; else None."""
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > MAX_ANSWER_LENGTH:
        return False
    left, right = _NUMBER.fullmatch(answer), _NUMBER.fullmatch(gold)
    if left is None or right is None:
        return None
    if Fraction(answer.replace(",", "")) == Fraction(gold.replace(",", "")):
        return True
    # Decimals that differ may still agree to the precision that math-verify compares at.
    return None if left["point"] or right["point"] else False


def looks_costly(answer: str) -> bool:
    """Whether grading may take long. A guess that decides only which queue an answer waits in."""
    return len(answer) > 200 or _COSTLY.search(answer) is not None
