"""Sound: a number is guessed in a few turns; each reply says higher or lower, and the last one tells the number."""

import re

import envgym

TURNS = 5


class HigherLower(envgym.Env):
    """Guess a number from 1 to 30."""

    async def reset(self, *, seed=None, options=None):
        self.turn = 0
        return [{"role": "user", "content": f"{self.task.prompt} You have {TURNS} guesses."}], {}

    async def step(self, action):
        self.turn += 1
        number = self.task.answer
        match = re.fullmatch(r"[0-9]{1,2}", action.text.strip())
        guess = int(match[0]) if match else None
        if guess == number:
            return [{"role": "user", "content": "Yes!"}], 1.0, True, False, {"score": 1.0}
        if self.turn == TURNS:
            return [{"role": "user", "content": f"It was {number}."}], 0.0, True, False, {"score": 0.0}
        reply = "A number from 1 to 30, please." if guess is None else "Higher." if guess < number else "Lower."
        return [{"role": "user", "content": reply}], 0.0, False, False, {}


class HigherLowerSpec(envgym.EnvSpec):
    env_class = HigherLower

    def tasks(self, split):
        names = ("Amy", "Ben", "Sam") if split == "train" else ("Tom",)
        return envgym.TaskList(
            [
                envgym.Task(f"{name}-{number}", f"{name} thinks of a number from 1 to 30.", number)
                for name in names
                for number in range(1, 31)
            ]
        )

    def demonstrations(self, task, seed):
        low, high, turns = 1, 30, []
        while not turns or int(turns[-1]) != task.answer:
            guess = (low + high) // 2
            turns.append(str(guess))
            low, high = (guess + 1, high) if guess < task.answer else (low, guess - 1)
        return turns
