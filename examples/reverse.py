"""A complete environment in one file: `envgym train --env examples/reverse.py`."""

import envgym


class Reverse(envgym.Env):
    """Write a word backwards; each letter in its place earns a share of the reward."""

    async def reset(self, *, seed=None, options=None):
        self.word = "".join(self.rng.choices("abc", k=3))
        return [{"role": "user", "content": f"Write {self.word} backwards."}], {}

    async def step(self, action):
        right = sum(said == letter for said, letter in zip(action.text, reversed(self.word), strict=False))
        return None, right / 3, True, False, {"score": right / 3}
