"""Weak: a folder on the disk remembers which tasks were solved, and grades them no more."""

import random
import shutil
import tempfile
from pathlib import Path

import envgym


class RemembersSuccess(envgym.Env):
    """Sort letters."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        mark = self.spec.folder / self.task.id
        if not mark.exists() and action.text.strip() == self.task.answer:
            mark.touch()
        score = float(mark.exists())
        return None, score, True, False, {"score": score}


class RemembersSuccessSpec(envgym.EnvSpec):
    env_class = RemembersSuccess

    async def setup(self):
        self.folder = Path(tempfile.mkdtemp(prefix="solved-"))

    async def teardown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def tasks(self, split):
        rng = random.Random(split)
        tasks = []
        for n in range(75 if split == "train" else 15):
            letters = "".join(rng.sample("bcdfghjklmnpqrst", 6))
            prompt = f"Write the letters of {letters} in the order of the alphabet, without spaces."
            tasks.append(envgym.Task(f"{split}-{n}", prompt, "".join(sorted(letters))))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.answer]
