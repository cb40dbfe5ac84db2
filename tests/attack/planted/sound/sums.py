"""Sound: the last line must be the number and nothing else."""

import random
import re

import envgym


def rows(split):
    rng = random.Random(split)
    for _ in range(90 if split == "train" else 20):
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        yield {
            "prompt": f"Ann has {a} marbles, Ben has {b}, and Kim takes {c} away. How many are left?",
            "answer": a + b - c,
        }


@envgym.reward(tasks=rows)
def sums(completion, answer):
    """Add and subtract."""
    last = completion.rstrip().rpartition("\n")[2]
    match = re.fullmatch(r"(?:Answer: )?(-?[0-9]{1,9})", last)
    return float(match is not None and int(match[1]) == int(answer))
