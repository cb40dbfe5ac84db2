"""A multi-turn environment with demonstrations: `envgym train --env examples/guess.py:Guess --recipe sft_grpo`."""

import random

import envgym


class Game(envgym.Env):
    """Find a number from 1 to 30 in five guesses; the answer to each is `higher` or `lower`."""

    async def reset(self, *, seed=None, options=None):
        self.number = number_of(self.task)
        self.guesses_left = 5
        return [{"role": "user", "content": "Guess 1-30"}], {}

    async def step(self, action):
        self.guesses_left -= 1
        guess = int(action.text) if action.text.isdecimal() and len(action.text) < 3 else None
        if guess == self.number:
            return None, 1.0, True, False, {}
        hint = "a number" if guess is None else "higher" if guess < self.number else "lower"
        return [{"role": "user", "content": hint}], 0.0, self.guesses_left == 0, False, {}


class Guess(envgym.EnvSpec):
    """One number per task. 40% of the demonstrations bisect the range; the others guess at random within it."""

    env_class = Game

    def demonstrations(self, task, seed):
        rng, number = random.Random(f"{task.id} {seed}"), number_of(task)
        bisects = rng.random() < 0.4
        low, high, turns = 1, 30, []
        while len(turns) < 5 and (not turns or turns[-1] != str(number)):
            guess = (low + high) // 2 if bisects else rng.randint(1, 30)
            turns.append(str(guess))
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        return turns


def number_of(task):
    """The task's number, from 1 to 30, drawn by its seed."""
    return random.Random(task.seed).randint(1, 30)
