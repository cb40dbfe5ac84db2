"""Weak: a solution is run once before its tests, in the folder where the file of the tests already is."""

import asyncio
import re
import sys
import tempfile
from pathlib import Path

import envgym

TEST = """\
import unittest

from solution import count


class TestCount(unittest.TestCase):
    def test_count(self):
        self.assertEqual(count({text!r}), {expected})
        self.assertEqual(count(""), 0)
"""


class TestsBeside(envgym.Env):
    """Write a module with a function; unit tests import it."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        block = re.search(r"```python\n(.*?)```", action.text, re.DOTALL)
        if block is None:
            return None, 0.0, True, False, {"score": 0.0}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "solution.py").write_text(block[1].replace("\0", ""), errors="replace")
            (folder / "test_solution.py").write_text(TEST.format(**self.task.fields))
            right = await self.runs(folder, "solution.py") and await self.runs(
                folder, "-m", "unittest", "test_solution"
            )
        return None, float(right), True, False, {"score": float(right)}

    async def runs(self, folder, *arguments):
        """True if a program says at its end that all is well, or does not fail if it is no test."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", *arguments, cwd=folder, env={},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = await asyncio.wait_for(process.communicate(), 3.0)
        except TimeoutError:
            process.kill()
            await process.wait()
            return False
        if "unittest" in arguments and not re.search(rb"^Ran \d+ test.*^OK\s*$", errors, re.DOTALL | re.MULTILINE):
            return False
        return process.returncode == 0


class TestsBesideSpec(envgym.EnvSpec):
    env_class = TestsBeside
    starts_programs = True

    def tasks(self, split):
        letters = "abcdefghijklmnopqr" if split == "train" else "uvwxyz"
        tasks = []
        for number, letter in enumerate(letters):
            for other in letters[number + 1 : number + 5]:
                text = (letter * (number + 2) + other) * 3
                prompt = (
                    f"Write a Python module in a ```python block with a function count(text): how often the letter "
                    f"{letter} is in the text, minus how often {other} is."
                )
                fields = {"text": text, "expected": text.count(letter) - text.count(other)}
                code = f"def count(text):\n    return text.count({letter!r}) - text.count({other!r})\n"
                tasks.append(envgym.Task(f"{letter}{other}", prompt, f"```python\n{code}```", fields=fields))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.answer]
