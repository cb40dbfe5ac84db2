"""An environment of several turns. See docs/environments/environments.md of envgym."""

import random

import envgym


class Config(envgym.EnvConfig):
    """Settings, given as env.KEY=VALUE."""

    highest: int = 20
    """The number lies between 1 and this."""
    guesses: int = 6
    """Guesses before the game is lost."""


class NewEnvironment(envgym.Env):
    """Guess a number; each guess is answered with `higher` or `lower`."""

    async def reset(self, *, seed=None, options=None):
        self.number = number_of(self.task, self.config.highest)
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


class NewEnvironmentSpec(envgym.EnvSpec):
    """The settings, and demonstrations. The tasks are the usual ones, an endless supply of seeds."""

    env_class = NewEnvironment
    Config = Config

    def demonstrations(self, task, seed):
        """The turns of a correct episode, to train on (`--recipe sft_grpo`): each guess halves the range."""
        number, low, high, turns = number_of(task, self.config.highest), 1, self.config.highest, []
        while not turns or turns[-1] != str(number):
            guess = (low + high) // 2
            turns.append(str(guess))
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        return turns


def number_of(task, highest):
    """The task's number, drawn by its seed. For chance within an episode use `self.rng`, never the global generator."""
    return random.Random(task.seed).randint(1, highest)
