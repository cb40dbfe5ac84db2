"""A complete environment in one file: `envgym train --env examples/reverse.py`."""

import envgym


class Reverse(envgym.Env):
    """Write a word backwards; the reward is the share of letters in the right position."""

    async def reset(self, *, seed=None, options=None):
        self.word = "".join(self.rng.choices("abcd", k=4))
        return [{"role": "user", "content": f"Write {self.word} backwards."}], {}

    async def step(self, action):
        answer = action.text.strip()
        matches = sum(guess == letter for guess, letter in zip(answer, reversed(self.word), strict=False))
        score = matches / max(len(answer), 4)  # extra letters lower the score
        return None, score, True, False, {"score": score}
