"""What comes back is not what Gymnasium's tuples hold, or does not come back at all."""
# ruff: noqa: ASYNC251  (they are here to be found)

import asyncio
import contextlib
import os
import time

from healthy import Sums

import envgym
import envgym.processes.cancellation
from envgym.types import Message


class NanReward(Sums):
    async def step(self, action):
        return None, float("nan"), True, False, {}


class TextReward(Sums):
    async def step(self, action):
        return None, "1.0", True, False, {}


class ScoreOfTwo(Sums):
    async def step(self, action):
        return None, 1.0, True, False, {"score": 2}


class FourTuple(Sums):
    async def step(self, action):
        return None, 1.0, True, {}


class NumberAsObservation(Sums):
    async def reset(self, *, seed=None, options=None):
        return 42, {}


class SaysNothing(Sums):
    """The problem is posed to nobody."""

    def ask(self):
        return []


class NoInfo(Sums):
    async def reset(self, *, seed=None, options=None):
        self.task = options["task"]
        return self.ask()


class WordAsFlag(Sums):
    """Every word is true."""

    async def step(self, action):
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward, "yes" if terminated else "", truncated, info


class NanMetric(Sums):
    async def step(self, action):
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward, terminated, truncated, {**info, "metrics": {"perplexity": float("inf")}}


class RaisesAfterAWhile(Sums):
    async def step(self, action):
        if self.left == 1:
            raise KeyError("second")
        return await super().step(action)


class RaisesInReset(Sums):
    async def reset(self, *, seed=None, options=None):
        return self.say(options["task"].fields["question"]), {}


class ForgetsToAwait(Sums):
    async def step(self, action):
        return None, self.grade(action.text), True, False, {}

    async def grade(self, text):
        return float(self.is_right(text))


class ForgetsToAwaitInReset(Sums):
    async def reset(self, *, seed=None, options=None):
        return self.fetch(), {}

    async def fetch(self):
        return "What is 1 + 1?"


class ForgetsToAwaitInMessages(ForgetsToAwaitInReset):
    async def reset(self, *, seed=None, options=None):
        return [{"role": "user", "content": self.fetch()}], {}


class ForgetsToAwaitInAList(ForgetsToAwaitInReset):
    async def reset(self, *, seed=None, options=None):
        return [self.fetch()], {}


class ForgetsToAwaitInAMessage(ForgetsToAwaitInReset):
    async def reset(self, *, seed=None, options=None):
        return Message("user", self.fetch()), {}


class ForgetsToAwaitInInfo(ForgetsToAwaitInReset):
    async def reset(self, *, seed=None, options=None):
        return "What is 1 + 1?", self.fetch()


class ForgetsToAwaitAtTheEnd(ForgetsToAwait):
    async def step(self, action):
        return None, 1.0, self.grade(action.text), False, {}


class ForgetsToAwaitAtALimit(ForgetsToAwait):
    async def step(self, action):
        return None, 1.0, True, self.grade(action.text), {}


class ForgetsToAwaitInStepsInfo(ForgetsToAwait):
    async def step(self, action):
        return None, 1.0, True, False, self.grade(action.text)


class TrustsThePolicy(Sums):
    """Takes it for granted that the answer is a number."""

    def is_right(self, text):
        return int(text) == int(self.task.answer)


class SwallowsItsEnd(Sums):
    """Takes a cancellation for one more reason to try again."""

    Config = type("Config", (envgym.EnvConfig,), {"__annotations__": {"call_timeout": float}, "call_timeout": 0.3})

    def __init__(self):
        envgym.processes.cancellation.GRACE_SECONDS = 0.2  # of this process, which is the check's own

    async def step(self, action):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)


class CancelsATask(Sums):
    async def step(self, action):
        task = asyncio.create_task(asyncio.sleep(1000))
        task.cancel()
        await task


class HangsInReset(Sums):
    """Waits for something that never comes."""

    Config = type("Config", (envgym.EnvConfig,), {"__annotations__": {"call_timeout": float}, "call_timeout": 1.0})

    async def reset(self, *, seed=None, options=None):
        import asyncio

        await asyncio.sleep(1000)


class HangsOnItsThread(Sums):
    Config = HangsInReset.Config

    def step(self, action):
        time.sleep(1000)


class HoldsTheLoopForGood(Sums):
    Config = HangsInReset.Config

    async def step(self, action):
        while True:
            time.sleep(0.1)


class EndsTheProcess(Sums):
    async def step(self, action):
        print("giving up", flush=True)
        os._exit(3)


class Exits(Sums):
    """As scripts do that were not written to be imported."""

    async def step(self, action):
        raise SystemExit("usage: grade.py ANSWER")


class NeverEnds(Sums):
    async def step(self, action):
        right = float(self.is_right(action.text))
        return self.say("Go on."), right, False, False, {"score": right}
