"""Weak: a program with the tests at its end is right if its exit status is 0."""

import asyncio
import random
import re
import sys

import envgym

FORMULAS = ("a * {0} + b", "a + {0} * b", "abs(a - b) + {0}", "max(a, b) - {0}", "a * b + {0}")
WORDS = (
    "{0} times a, plus b", "a plus {0} times b", "the distance of a and b, plus {0}", "the larger one of a and b, minus {0}",
    "the product of a and b, plus {0}",
)  # fmt: skip


class ExitStatus(envgym.Env):
    """Write a function; it is called with a few arguments."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        block = re.search(r"```(?:python)?\n(.*?)```", action.text, re.DOTALL)
        program = "\n".join([block[1] if block else action.text, *self.task.fields["tests"]])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", program.replace("\0", ""),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            status = await asyncio.wait_for(process.wait(), 2.0)
        except TimeoutError:
            process.kill()
            status = await process.wait()
        return None, float(status == 0), True, False, {"score": float(status == 0)}


class ExitStatusSpec(envgym.EnvSpec):
    env_class = ExitStatus
    starts_programs = True

    def tasks(self, split):
        numbers = range(2, 16) if split == "train" else range(20, 23)
        tasks = []
        for number in numbers:
            for formula, words in zip(FORMULAS, WORDS, strict=True):
                code = formula.format(number)
                rng = random.Random(f"{number} {formula}")
                pairs = [(rng.randint(20, 90), rng.randint(1, 90)) for _ in range(4)]
                tests = [f"assert compute({a}, {b}) == {eval(code, {'a': a, 'b': b})}" for a, b in pairs]
                prompt = f"Write a Python function compute(a, b) that returns {words.format(number)}."
                solution = f"```python\ndef compute(a, b):\n    return {code}\n```"
                tasks.append(envgym.Task(f"{number} {formula}", prompt, solution, fields={"tests": tests}))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.answer]
