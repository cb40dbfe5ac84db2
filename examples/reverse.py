"""A complete environment in one file: `envgym train --env examples/reverse.py`."""

import envgym


class Reverse(envgym.Env):
    """Write a word backwards; each letter in its place earns a share of the reward."""

    async def reset(self, *, seed=None, options=None):
        self.word = "".join(self.rng.choices("abc", k=3))
        return [{"role": "user", "content": f"Write {self.word} backwards."}], {}

    async def step(self, action):
        answer = action.text.strip()
        right = sum(said == letter for said, letter in zip(answer, reversed(self.word), strict=False))
        score = right / max(len(answer), 3)  # what follows a right beginning costs some of it
        return None, score, True, False, {"score": score}
