"""Environments that are served to NeMo-Gym."""

from envgym import Env, EnvSpec
from envgym.errors import ConfigError, InvalidOutcome
from envgym.types import Message, Observation, ToolSpec

TAKE = ToolSpec("take", "Take some stones.", {"type": "object", "properties": {"count": {"type": "integer"}}})


class Stones(Env):
    """Take stones with a tool until none is left, then say so: 0.25 a stone, 1 for the end. Five calls are too many."""

    async def reset(self, *, seed=None, options=None):
        self.left, self.calls = 2 + seed % 2, 0
        return Observation((Message("system", "A game."), Message("user", f"{self.left} stones")), tools=(TAKE,)), {}

    async def step(self, action):
        if not action.tool_calls:
            done = float(self.left == 0 and "none" in action.text)
            return None, done, True, False, {"score": done, "metrics": {"calls": float(self.calls)}}
        results = []
        for call in action.tool_calls:
            self.calls += 1
            if call.error or call.name != "take":
                text = call.error or f"there is no tool {call.name}"
            else:
                self.left -= call.arguments["count"]
                text = f"{self.left} left"
            results.append(Message("tool", text, tool_call_id=call.id))
        return results, 0.25 * len(results), False, self.calls > 5, {}


class Guess(Env):
    """Guess a number that the seed draws; hints in words. Raw text, no tools."""

    async def reset(self, *, seed=None, options=None):
        self.number, self.guesses = seed % 8, 0
        return "guess a number below 8", {}

    async def step(self, action):
        guess = int(action.text.split()[-1])
        self.guesses += 1
        if guess == self.number:
            return None, 1.0, True, False, {"metrics": {"guesses": float(self.guesses)}}
        return "higher" if guess < self.number else "lower", None, False, self.guesses == 7, {}


class Broken(Env):
    """Fails in every way, by the seed of the task."""

    async def reset(self, *, seed=None, options=None):
        return "hello", {}

    async def step(self, action):
        if action.text == "raise":
            raise InvalidOutcome("judge", "the judge is out", retryable=True)
        return None, None, True, False, {}


class Unposed(Broken):
    """Cannot pose every task."""

    async def reset(self, *, seed=None, options=None):
        if seed == 1:
            raise KeyError("three")
        return "hello", {}


class Unset(Broken):
    """Lacks a setting without which no task can be posed."""

    async def reset(self, *, seed=None, options=None):
        raise ConfigError("which judge? set env.judge")


class TrainOnly(EnvSpec):
    env_class = Broken

    def tasks(self, split):
        if split == "test":
            raise ConfigError("no held-out file")
        return super().tasks(split)


class Judged(EnvSpec):
    env_class = Broken

    async def score_group(self, task, episodes):
        return [1.0] * len(episodes)
