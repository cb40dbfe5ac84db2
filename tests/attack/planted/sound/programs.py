"""Sound: programs run in the sandbox, and their results are compared outside of it."""

import random

import envgym
from envgym.envs.code import Code


class Programs(Code):
    """Write a function of two numbers."""

    def default_tasks(self, split):
        numbers = range(2, 18) if split == "train" else range(30, 33)
        tasks = []
        for number in numbers:
            for name, code in {
                "the remainder": f"(a * {number} + b) % 97", "the quotient": f"(a * {number} + b) // 7",
                "the larger": f"max(a * {number}, b)", "the distance": f"abs(a * {number} - b)",
            }.items():  # fmt: skip
                rng = random.Random(f"{number} {name}")
                pairs = [(rng.randint(1, 99), rng.randint(100, 999)) for _ in range(4)]
                tests = [{"call": "f", "args": [a, b], "expected": eval(code, {"a": a, "b": b})} for a, b in pairs]
                prompt = f"Write a Python function f(a, b) that returns {code} ({name})."
                answer = f"def f(a, b):\n    return {code}\n"
                tasks.append(envgym.Task(f"{name} {number}", prompt, answer, fields={"tests": tests}))
        return envgym.TaskList(tasks)
