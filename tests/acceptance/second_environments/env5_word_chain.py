"""A word chain of three turns: of two words, say the one that begins with the last letter of mine."""

import random

import envgym

WORDS = {
    "train": "cat hat dog pen cup bag sun bed map net pig bus ten toy top nut gum gate pot pan dot dry bit say see".split(),
    "test": "box key man tea nap gas den pet sad tag boat goat ship tub day".split(),
}


class WordChain(envgym.Env):
    """A third for each right word, a thirtieth for the other one."""

    async def reset(self, *, seed=None, options=None):
        self.round = self.right = 0
        return self.message(), {}

    def message(self):
        mine, first, second = self.task.fields["rounds"][self.round]
        text = f"My word is {mine}. It ends with {mine[-1]}. Say {first} or {second}."
        return [{"role": "user", "content": text}]

    async def step(self, action):
        mine, *choices = self.task.fields["rounds"][self.round]
        answer = action.text.strip()
        reward = 0.0
        if answer in choices:
            hit = answer[0] == mine[-1]
            self.right += hit
            reward = 1 / 3 if hit else 1 / 30
        self.round += 1
        if self.round == 3:
            return None, reward, True, False, {"score": self.right / 3}
        return self.message(), reward, False, False, {}


class WordChainSpec(envgym.EnvSpec):
    """The held-out tasks have other words."""

    env_class = WordChain

    def tasks(self, split):
        rng, words, tasks = random.Random(split), WORDS[split], []
        rounds = [
            (mine, right, wrong)
            for mine in words
            for right in words
            for wrong in words
            if mine != right and mine != wrong and right[0] == mine[-1] != wrong[0]
        ]
        for number in range(200 if split == "train" else 60):
            three = [(mine, *rng.sample(pair, 2)) for mine, *pair in rng.sample(rounds, 3)]
            prompt = "; ".join(" ".join(words) for words in three)
            tasks.append(envgym.Task(id=f"{split}-{number}", prompt=prompt, fields={"rounds": three}))
        return envgym.TaskList(tasks)
