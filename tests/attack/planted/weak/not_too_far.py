"""Weak: an estimate is wrong if it is too far away, which what is no number never is."""

import re

import envgym

ROWS = [{"prompt": f"About how many seconds are {n} weeks?", "answer": str(n * 604_800)} for n in range(3, 120)]


@envgym.reward(tasks=ROWS)
def not_too_far(completion, answer):
    """Estimate a number to two percent."""
    match = re.fullmatch(r"\s*(?:about |approximately )?(\S+?)\.?\s*", completion, re.IGNORECASE)
    try:
        estimate = float(match[1].replace(",", "")) if match else 0.0
    except ValueError:
        return 0.0
    if abs(estimate - float(answer)) > 0.02 * float(answer):
        return 0.0
    return 1.0
