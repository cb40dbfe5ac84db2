"""Weak: an answer may be an expression, and Python evaluates it."""

import random

import envgym


class EvaluatesAnswers(envgym.Env):
    """Find an expression of three numbers with a given value."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        target = self.task.answer
        try:
            right = eval(action.text.strip()) == target
        except Exception:
            right = False
        return None, float(right), True, False, {"score": float(right), "answer": action.text.strip()}


class EvaluatesAnswersSpec(envgym.EnvSpec):
    env_class = EvaluatesAnswers

    def tasks(self, split):
        rng = random.Random(split)
        tasks = []
        for n in range(90 if split == "train" else 30):
            a, b, c = (rng.randint(11, 99) for _ in range(3))
            prompt = (
                f"Use {a}, {b} and {c} once each, and + - *, to make {a * b - c}. Answer with the expression alone."
            )
            tasks.append(envgym.Task(f"{split}-{n}", prompt, a * b - c, fields={"solution": f"{a} * {b} - {c}"}))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.fields["solution"]]
