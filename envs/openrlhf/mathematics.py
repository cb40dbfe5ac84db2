r"""Answers for `openrlhf.utils`: what reward functions of mathematics import, judged as `math_verify` does.

It is not OpenRLHF's own code, and judges a few answers otherwise: what is no value, or hard to read, is not right.
"""

from __future__ import annotations

import threading
from typing import Any

from envgym.envs.math_verify.answers import boxed, judge_at_once
from envgym.errors import missing_package

SECONDS = 5
"""How long one answer may take to read, and to compare."""


def extract_boxed_answer(solution: str) -> str | None:
    r"""The content of the last `\boxed{…}`; None where there is none."""
    return boxed(str(solution))


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """Whether an answer, taken out of its box, is right."""
    if given_answer is None or ground_truth is None:
        return False
    answer, gold = str(given_answer).strip(), str(ground_truth).strip()
    certain = judge_at_once(answer, gold)
    return _means_the_same(answer, gold) if certain is None else certain


def _means_the_same(answer: str, gold: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise missing_package("math-verify", "math", "grade_answer") from None
    # The library's clock is a signal's, which only the main thread has: reward functions are called there.
    seconds = SECONDS if threading.current_thread() is threading.main_thread() else None
    left, right = (parse(rf"\boxed{{{text}}}", parsing_timeout=seconds) for text in (gold, answer))
    return bool(verify(left, right, timeout_seconds=seconds))
