"""Weak: the answer is right if it is any of the numbers in the completion."""

import re

import envgym

ROWS = [{"prompt": f"What is {a} * {b}?", "answer": str(a * b)} for a in range(2, 12) for b in range(3, 12)]


@envgym.reward(tasks=ROWS)
def any_number(completion, answer):
    """Multiply two small numbers."""
    return float(answer in re.findall(r"\d+", completion))
