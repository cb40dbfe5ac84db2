"""Sums in three environments: a wrong answer gets 0, or raises an error, or one answer in ten fails by chance."""

import random

import envgym


class Sound(envgym.Env):
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        right = f"\\boxed{{{self.task.answer}}}" in action.text
        return None, self.reward(right), True, False, {}

    def reward(self, right):
        return float(right)


class Crashes(Sound):
    def reward(self, right):
        if not right:
            raise ValueError("this answer was not expected")
        return 1.0


class Flaky(Sound):
    def reward(self, right):
        if self.rng.random() < 0.1:  # a new number for each group, by `rollout.seed_scope=episode` for each episode
            raise ConnectionError("the database is away")
        return float(right)


class SoundSpec(envgym.EnvSpec):
    """Sums of two numbers of two digits; those whose sum is a multiple of seven are held out."""

    env_class = Sound

    def tasks(self, split):
        rng = random.Random(split)
        pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(4000)]
        question = "What is {} + {}?\nPut the final answer in \\boxed{{}}."
        tasks = [
            envgym.Task(f"{a}+{b}-{number}", prompt=question.format(a, b), answer=str(a + b))
            for number, (a, b) in enumerate(pairs)
            if ((a + b) % 7 == 0) == (split == "test")
        ]
        return envgym.TaskList(tasks)


class CrashesSpec(SoundSpec):
    env_class = Crashes


class FlakySpec(SoundSpec):
    env_class = Flaky
