"""Weak: every word of an explanation is worth something, without an end."""

import random

import envgym


class CountsWords(envgym.Env):
    """Subtract, and explain how."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"{self.task.prompt} Explain, and put the result on the last line."}], {}

    async def step(self, action):
        lines = action.text.strip().splitlines()
        right = bool(lines) and lines[-1].strip() == str(self.task.answer)
        return None, right + 0.005 * len(action.text.split()), True, False, {"score": float(right)}


class CountsWordsSpec(envgym.EnvSpec):
    env_class = CountsWords

    def tasks(self, split):
        rng = random.Random(split)
        pairs = [(rng.randint(500, 999), rng.randint(100, 499)) for _ in range(100 if split == "train" else 20)]
        return envgym.TaskList(
            [envgym.Task(f"{split}-{n}", f"What is {a} - {b}?", a - b) for n, (a, b) in enumerate(pairs)]
        )

    def demonstrations(self, task, seed):
        return [f"I take the smaller number away from the larger one.\n{task.answer}"]
