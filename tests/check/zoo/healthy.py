"""An environment with nothing wrong, from which each animal of the zoo differs in one way."""

import copy

import envgym


def tasks_of(split):
    """Sums: 90 to train on, 20 others held out."""
    pairs = [(a, b) for a in range(21, 31) for b in range(41, 52)]
    chosen = [pair for number, pair in enumerate(pairs) if (number % 11 < 2) == (split == "test")]
    return [envgym.Task(f"{a}-{b}", f"What is {a} + {b}?", str(a + b)) for a, b in chosen]


class Sums(envgym.Env):
    """Two tries at a sum."""

    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        self.left = 2
        self.luck = self.rng.randrange(1000)
        return self.ask(), {}

    async def step(self, action):
        right = self.is_right(action.text)
        self.left -= 1
        if not right and self.left:
            return self.say(f"No. Your lucky number is {self.luck}."), 0.0, False, False, {}
        return None, float(right), True, False, {"score": float(right), "metrics": {"tries": 2 - self.left}}

    def fork(self):
        return copy.copy(self)

    def ask(self):
        return self.say(self.task.prompt)

    def say(self, text):
        return [{"role": "user", "content": text}]

    def is_right(self, text):
        return text.strip() == self.task.answer


class SumsSpec(envgym.EnvSpec):
    """Made for an `Env` class that registers by itself."""

    def tasks(self, split):
        return envgym.TaskList(tasks_of(split))

    def demonstrations(self, task, seed):
        return [task.answer]


Sums.spec_class = SumsSpec


class BlockingSums(Sums):
    """The same with methods that block, and may."""

    blocking = True
