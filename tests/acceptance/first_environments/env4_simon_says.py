"""Simon says, four turns."""

import random

import envgym

ACTIONS = {
    "train": "run sit hop walk jump sing eat nap wave go swim read dig cut look play".split(),
    "test": "draw kick push pull ask turn nod bow".split(),
}
OTHERS = ["Amy", "Ben", "Sam", "Tom", "Ann", "Max"]
TURNS = 4


class SimonSays(envgym.Env):
    """Repeat the action if Simon says it, else say no; each of the four turns gives a quarter."""

    async def reset(self, *, seed=None, options=None):
        self.turn, self.total = 0, 0.0
        return [{"role": "user", "content": "Do what Simon says, but say no to others. " + self.command()}], {}

    async def step(self, action):
        speaker, word = self.task.fields["commands"][self.turn]
        right = word if speaker == "Simon" else "no"
        reward = (action.text.strip().lower().rstrip(".") == right) / TURNS
        self.turn, self.total = self.turn + 1, self.total + reward
        if self.turn == TURNS:
            return None, reward, True, False, {"score": self.total}
        return [{"role": "user", "content": self.command()}], reward, False, False, {}

    def command(self):
        speaker, word = self.task.fields["commands"][self.turn]
        return f"{speaker} says {word}. Say {word} or no."


class SimonSaysSpec(envgym.EnvSpec):
    """The actions of the test split are other words. Of four commands, one or two are not Simon's."""

    env_class = SimonSays

    def tasks(self, split):
        tasks = []
        for number in range(400 if split == "train" else 40):
            rng = random.Random(f"{split} {number}")
            speakers = ["Simon", "Simon", rng.choice(OTHERS), "Simon" if number % 2 else rng.choice(OTHERS)]
            rng.shuffle(speakers)
            commands = [[speaker, word] for speaker, word in zip(speakers, rng.sample(ACTIONS[split], TURNS))]
            prompt = ", ".join(" says ".join(command) for command in commands)
            tasks.append(envgym.Task(id=f"{split}-{number}", prompt=prompt, fields={"commands": commands}))
        return envgym.TaskList(tasks)
