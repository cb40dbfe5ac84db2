"""The numbers game: an expression of four given numbers with a given value. The policy's text is evaluated, but as a tree of
four operations, with exact fractions, and the numbers are counted. Sound."""

import ast
import random
from collections import Counter
from fractions import Fraction

import envgym

OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def value_of(node, used):
    """The value of an expression; the numbers in it are appended to `used`. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = value_of(node.left, used), value_of(node.right, used)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return OPERATIONS[type(node.op)](left, right)
    raise ValueError("only the four operations")


class Countdown(envgym.Env):
    """Write an expression of given numbers with a given value."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        score = self.score(action.text.strip())
        return None, score, True, False, {"score": score, "answer": action.text.strip()}

    def score(self, text):
        if not 0 < len(text) <= 100:
            return 0.0
        used = []
        try:
            value = value_of(ast.parse(text, mode="eval").body, used)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return 0.0
        numbers, target = self.task.fields["numbers"], self.task.fields["target"]
        return float(Counter(used) == Counter(numbers) and value == target)


class CountdownSpec(envgym.EnvSpec):
    env_class = Countdown

    def tasks(self, split):
        tasks = []
        for number in range(150) if split == "train" else range(150, 200):
            rng = random.Random(f"countdown {number}")
            while True:
                numbers = [rng.randrange(2, 13) for _ in range(4)]
                a, b, c, d = numbers
                x, y, z = rng.choices("+-*", k=3)
                text = rng.choice((f"({a} {x} {b}) {y} ({c} {z} {d})", f"(({a} {x} {b}) {y} {c}) {z} {d}"))
                target = value_of(ast.parse(text, mode="eval").body, [])
                if 13 < target < 500:
                    break
            shown = ", ".join(map(str, sorted(numbers)))
            prompt = (
                f"Puzzle {number}: use each of the numbers {shown} exactly once, with + - * / and parentheses, to make "
                f"{target}. Answer with the expression only."
            )
            fields = {"numbers": numbers, "target": int(target)}
            tasks.append(envgym.Task(id=f"countdown-{number}", prompt=prompt, answer=text, fields=fields))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.answer]
