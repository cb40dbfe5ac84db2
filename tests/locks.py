"""An environment of ten turns with one reward at the end: `benchmarks/tree.py` trains on it."""

import random

import envgym

LETTERS = "abcdefgh"
TURNS = 10


class Lock(envgym.Env):
    """Answer each of ten letters with the one after it, `h` with `a`. The lock opens, for the reward 1, if all ten are
    right; nothing says before the end whether one was."""

    async def reset(self, *, seed=None, options=None):
        self.letters, self.answers = letters_of(self.task), []
        return [{"role": "user", "content": self.letters[0]}], {}

    async def step(self, action):
        self.answers.append(action.text)
        n_answers = len(self.answers)
        if n_answers < TURNS:
            return [{"role": "user", "content": self.letters[n_answers]}], None, False, False, {}
        return None, float(self.answers == [answer_to(letter) for letter in self.letters]), True, False, {}


class Locks(envgym.EnvSpec):
    """One answer in seven of the demonstrations is a random letter."""

    env_class = Lock

    def demonstrations(self, task, seed):
        rng = random.Random(f"{task.id} {seed}")
        return [rng.choice(LETTERS) if rng.random() < 1 / 7 else answer_to(letter) for letter in letters_of(task)]


def letters_of(task):
    """The ten letters of a task, drawn by its seed."""
    rng = random.Random(task.seed)
    return [rng.choice(LETTERS) for _ in range(TURNS)]


def answer_to(letter):
    return LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)]
