"""Two of three words are the same: say the other one."""

import random

import envgym

WORDS = {
    "train": "cat hat dog box pen cup bag sun bed map fan net jar pig cow bus egg ant big old".split(),
    "test": "key car bee fox hen leg man boy nut red".split(),
}


class OddOneOut(envgym.Env):
    """1 for the odd word, a tenth for the other word of the prompt."""

    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": f"{self.task.prompt}. Which word is not like the others?"}], {}

    async def step(self, action):
        answer = action.text.strip()
        score = float(answer == self.task.answer)
        reward = score or (0.1 if answer in self.task.prompt.split(", ") else 0.0)
        return None, reward, True, False, {"score": score, "answer": answer}


class OddOneOutSpec(envgym.EnvSpec):
    """The held-out tasks have other words."""

    env_class = OddOneOut

    def tasks(self, split):
        pairs = [(odd, same) for odd in WORDS[split] for same in WORDS[split] if odd != same]
        rng, tasks = random.Random(split), []
        for odd, same in rng.sample(pairs, 240 if split == "train" else 60):
            words = [same, same]
            words.insert(rng.randrange(3), odd)
            tasks.append(envgym.Task(id="-".join(words), prompt=", ".join(words), answer=odd))
        return envgym.TaskList(tasks)
