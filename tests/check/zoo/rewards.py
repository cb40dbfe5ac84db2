"""The answer is given away, or the grader is."""

from healthy import Sums, SumsSpec

import envgym
from envgym.types import Observation, ToolSpec


class LeaksInThePrompt(Sums):
    def ask(self):
        return self.say(f"{self.task.prompt} (solution: {self.task.answer})")


class LeaksInATool(Sums):
    def ask(self):
        told = f"Checks an answer against the expected value {self.task.answer}."
        parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
        return Observation(
            tuple(map(message, self.say(self.task.prompt))), tools=(ToolSpec("check", told, parameters),)
        )

    async def step(self, action):
        results = [
            envgym.Message("tool", message({"role": "tool", "content": "no"}).content, (), call.id, call.name)
            for call in action.tool_calls
        ]
        observation, *rest = await super().step(action)
        return results if results and observation else observation, *rest


def message(said):
    return envgym.Message(said["role"], said["content"])


class NeverPays(SumsSpec):
    """Whatever it would pay for, nobody shows it."""

    env_class = type("Unmoved", (Sums,), {"is_right": lambda self, text: False})

    def demonstrations(self, task, seed):
        raise envgym.errors.ConfigError("none are known")


class WrongDemonstrations(SumsSpec):
    env_class = Sums

    def demonstrations(self, task, seed):
        return [f"The answer is {task.answer}.", "I am sure."]


class DemonstrationsThatRaise(SumsSpec):
    env_class = Sums

    def demonstrations(self, task, seed):
        return [task.fields["solution"]]


class PaysForSilence(Sums):
    """The less is said the better."""

    def is_right(self, text):
        return len(text.strip()) < 3


class FindsTheAnswerAnywhere(Sums):
    """Half of a pair is the answer, and any text that holds it will do."""

    def ask(self):
        numbers = [int(self.task.answer), int(self.task.answer) - self.rng.randrange(1, 40)]
        self.rng.shuffle(numbers)
        return self.say(f"Which is larger, {numbers[0]} or {numbers[1]}?")

    def is_right(self, text):
        return self.task.answer in text


class NeverRewards(Sums):
    """Forgot what the second thing is for."""

    async def step(self, action):
        return None, None, True, False, {}


class NeverEndsNorRewards(Sums):
    """Is paid at an end that never comes."""

    async def step(self, action):
        return self.say("Go on."), None, False, False, {}


class RaisesOrNeverRewards(Sums):
    """Cannot take silence, and pays for nothing else."""

    async def step(self, action):
        return None, None, bool(action.text.split()[0]), False, {}


class PaysForEffort(Sums):
    """A wrong answer earns more than half."""

    async def step(self, action):
        score = 1.0 if self.is_right(action.text) else 0.6
        return None, score, True, False, {"score": score}


class PaysTooMuch(Sums):
    """Rewards that are no scores."""

    async def step(self, action):
        right = self.is_right(action.text)
        return None, 100.0 if right else -5.0, True, False, {}


class JudgesNoSilence(SumsSpec):
    """Compares the answers of a group by their first words, which not all have."""

    env_class = Sums

    async def score_group(self, task, episodes):
        words = [episode.messages[-1].text.split()[0] for episode in episodes]
        return [float(word == task.answer) for word in words]
