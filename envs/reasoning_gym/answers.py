"""Reading the answer out of what a policy said, and what a score of an answer is worth."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def tagged(text: str) -> str | None:
    """The content of the last `<answer>…</answer>`, or None where there is none."""
    found = _TAGGED.findall(text)
    return found[-1].strip() if found else None


def extracted(text: str) -> str:
    """The answer within a policy's words: what is tagged; without tags the last line that says anything."""
    answer = tagged(text)
    if answer is not None:
        return answer
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def without_length_ratio(score: float, answer: str, gold: str | None) -> float:
    """The score, or 0 where it is only the share of the answer's characters that the right one makes up.

    The library pays that to any answer that holds the right one somewhere, so that talking around it, or listing
    everything it could be, earns something.
    """
    if not gold or not 0 < score < 1:
        return score
    for comma in (",", ""):
        right, said = gold.replace(comma, ""), answer.replace(comma, "")
        if right in said and abs(score - len(right) / len(said)) < 1e-9:
            return 0.0
    return score
