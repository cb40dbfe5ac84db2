"""Weak: the right option must be in the completion, and the other options may be there too."""

import itertools

import envgym

GRAMS = {"feather": 1, "lemon": 100, "brick": 3000, "dog": 20_000, "piano": 300_000, "whale": 90_000_000, "coin": 7}
TRIPLES = list(itertools.permutations(GRAMS, 3))


def rows(split):
    triples = [triple for n, triple in enumerate(TRIPLES) if (n % 7 == 3) == (split == "test")]
    for triple in triples:
        prompt = f"Which of the three is the heaviest: a {triple[0]}, a {triple[1]} or a {triple[2]}?"
        yield {"prompt": prompt, "answer": max(triple, key=GRAMS.__getitem__)}


@envgym.reward(tasks=rows)
def names_the_option(completion, answer):
    """Name the heaviest of three things."""
    return float(answer in completion.lower())
