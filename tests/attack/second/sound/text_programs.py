"""Python programs that read a line and print another. They get the inputs alone, and what they print is compared outside the
sandbox; every input must come out right, and no output is the same for all of them. Sound."""

import random
import re

import envgym
from envgym.sandbox import Limits, Sandbox

WORDS = (
    "amber birch cedar delta ember fjord grove haven islet jetty knoll ledge marsh north ocean plume quay ridge".split()
)
KINDS = {
    "prints every word with its letters from position {k} on moved to the front": (
        'print(" ".join(word[{k}:] + word[:{k}] for word in input().split()))'
    ),
    "prints the words sorted by their letter number {k} (the first has number 0); equal ones keep their order": (
        'print(" ".join(sorted(input().split(), key=lambda word: word[{k} : {k} + 1])))'
    ),
    "prints the line with every letter moved {k} places on in the alphabet (after z comes a), spaces unchanged": (
        'print("".join(c if c == " " else chr((ord(c) - 97 + {k}) % 26 + 97) for c in input()))'
    ),
    "prints the words after the first {k}, in reverse order": 'print(" ".join(input().split()[{k}:][::-1]))',
    "prints, for every word, its number of letters times {k}, separated by spaces": (
        'print(" ".join(str(len(word) * {k}) for word in input().split()))'
    ),
}


class TextPrograms(envgym.Env):
    """Write a program that changes a line of words."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        blocks = re.findall(r"```python\n(.*?)```", action.text, re.DOTALL)
        score = await self.score(blocks[-1]) if blocks else 0.0
        return None, score, True, False, {"score": score}

    async def score(self, program):
        rng = random.Random(f"inputs {self.task.id}")
        for length in (5, 6, 7, 8):
            line = " ".join(word[: rng.randrange(1, 6)] for word in rng.sample(WORDS, length))
            printed, expected = [await self.spec.sandbox.run(code, line) for code in (program, self.task.answer)]
            if expected.reason != "ok":
                raise envgym.errors.InvalidOutcome("sandbox", "the reference program did not run", retryable=True)
            if printed.reason != "ok" or printed.stdout.strip() != expected.stdout.strip():
                return 0.0
        return 1.0


class TextProgramsSpec(envgym.EnvSpec):
    env_class = TextPrograms
    starts_programs = True

    async def setup(self):
        await super().setup()
        self.sandbox = await self.closing.enter_async_context(Sandbox(Limits(cpu_seconds=2, memory_mb=256)))

    def tasks(self, split):
        tasks = []
        for number, (text, code) in enumerate(KINDS.items()):
            for k in range(1, 4) if number in (0, 1, 3) else range(2, 26):
                if (k % 5 == 3) == (split == "test"):
                    prompt = (
                        f"Write a Python program that reads one line of small letters and spaces and "
                        f"{text.format(k=k)}. Answer with one ```python block."
                    )
                    tasks.append(envgym.Task(id=f"{number}-{k}", prompt=prompt, answer=code.format(k=k)))
        # The same in other words, so that there are enough tasks.
        again = [
            envgym.Task(
                id=f"{task.id}-again", prompt=task.prompt.replace("Write a", "Please give me a"), answer=task.answer
            )
            for task in tasks
        ]
        return envgym.TaskList(tasks + again)

    def demonstrations(self, task, seed):
        return [f"```python\n{task.answer}\n```"]
