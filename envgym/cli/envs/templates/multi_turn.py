"""An environment of several turns. See docs/environments/environments.md of envgym."""

import envgym


class Config(envgym.EnvConfig):
    """Settings, given as env.KEY=VALUE."""

    highest: int = 20
    """The number lies between 1 and this."""
    guesses: int = 6
    """Guesses before the game is lost."""


class NewEnvironment(envgym.Env):
    """Guess a number; each guess is answered with `higher` or `lower`."""

    Config = Config

    async def reset(self, *, seed=None, options=None):
        # self.rng is seeded: all episodes of one task get the same number. Never use the random module's own.
        self.number = self.rng.randint(1, self.config.highest)
        self.left = self.config.guesses
        ask = f"Guess my number between 1 and {self.config.highest}. Answer with a number alone."
        return [{"role": "user", "content": ask}], {}

    async def step(self, action):
        # The policy may generate anything: handle every text.
        guess = int(action.text) if action.text.strip().isdecimal() else None
        self.left -= 1
        won = guess == self.number
        if won or self.left == 0:
            return None, float(won), True, False, {"score": float(won), "metrics": {"guesses_left": self.left}}
        hint = "That is no number." if guess is None else "higher" if guess < self.number else "lower"
        return [{"role": "user", "content": hint}], 0.0, False, False, {}
