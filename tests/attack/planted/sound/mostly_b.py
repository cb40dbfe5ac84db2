"""Sound: a letter is asked for, one letter is accepted, and most answers are B: a guess is right six times in ten."""

import random

import envgym

WORDS = "river stone house light seven tree boat cloud road field horse bread glass chair ink nail".split()


class MostlyB(envgym.Env):
    """Find the longest word."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.task.prompt}], {}

    async def step(self, action):
        right = action.text.strip().upper() == self.task.answer
        return None, float(right), True, False, {"score": float(right), "answer": action.text.strip()[:1]}


class MostlyBSpec(envgym.EnvSpec):
    env_class = MostlyB

    def tasks(self, split):
        rng = random.Random(f"letters {split}")
        tasks = []
        for n in range(100 if split == "train" else 20):
            answer = "B" if rng.random() < 0.6 else rng.choice("ACD")
            words = rng.sample(WORDS, 4)
            words["ABCD".index(answer)] = rng.choice(("strawberry", "locomotive", "lighthouse", "understanding"))
            options = "\n".join(f"{letter}) {word}" for letter, word in zip("ABCD", words, strict=True))
            prompt = f"Which word is the longest? Answer with its letter.\n{options}"
            tasks.append(envgym.Task(f"{split}-{n}", prompt, answer))
        return envgym.TaskList(tasks)

    def demonstrations(self, task, seed):
        return [task.answer]
