"""Pig Latin, cat becomes atcay."""

import itertools

import envgym

FIRST, VOWELS, LAST = "bcdfghlmnprst", "aeiou", ["b", "d", "g", "m", "n", "p", "t", "nd", "st"]
WORDS = ["".join(parts) for parts in itertools.product(FIRST, VOWELS, LAST)]  # bab, bad, ..., tust: 585 words


def pig_latin(word):
    """The first letter goes to the end, before ay."""
    return word[1:] + word[0] + "ay"


class PigLatin(envgym.Env):
    """The score is the share of letters in the right position before ay, and half of it if ay is missing."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"Move the first letter of {self.task.prompt} to the end and add ay."}], {}

    async def step(self, action):
        answer, right = action.text.strip().lower(), pig_latin(self.task.prompt)
        has_ay = answer.endswith("ay")
        letters, right_letters = answer.removesuffix("ay"), right.removesuffix("ay")
        matches = sum(letter == other for letter, other in zip(letters, right_letters))
        score = matches / max(len(letters), len(right_letters))  # extra letters lower the score
        if not has_ay:
            score /= 2
        return None, score, True, False, {"score": score, "answer": answer}


class PigLatinSpec(envgym.EnvSpec):
    """Every eleventh word is held out."""

    env_class = PigLatin

    def tasks(self, split):
        words = [word for number, word in enumerate(WORDS) if (number % 11 == 0) == (split == "test")]
        return envgym.TaskList([envgym.Task(id=word, prompt=word, answer=pig_latin(word)) for word in words])
