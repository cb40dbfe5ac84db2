"""Something stays when the episode or the environment is over."""
# ruff: noqa: ASYNC220, ASYNC251, SIM115  (they are here to be found)

import subprocess
import tempfile
import time

from healthy import Sums, SumsSpec

import envgym
from envgym.types import Observation, ToolSpec


class LeavesAProcess(Sums):
    async def reset(self, *, seed=None, options=None):
        self.program = subprocess.Popen(["sleep", "1000"])
        return await super().reset(seed=seed, options=options)


opened = []


class LeavesAFile(Sums):
    async def reset(self, *, seed=None, options=None):
        opened.append(tempfile.TemporaryFile())
        return await super().reset(seed=seed, options=options)


class LeavesAPool(SumsSpec):
    """Set up once, and never torn down."""

    env_class = Sums

    async def setup(self):
        self.program = subprocess.Popen(["sleep", "1000"])


class CloseRaises(Sums):
    async def close(self):
        raise RuntimeError("cannot close")


class CloseNeedsAReset(Sums):
    async def close(self):
        del self.task


class CloseHangs(Sums):
    async def close(self):
        import asyncio

        await asyncio.sleep(1000)


class NoSchema(Sums):
    def ask(self):
        tools = (ToolSpec("guess", "Guess it.", {"type": "object", "properties": {"at": {"type": "str"}}}),)
        return Observation((envgym.Message("user", self.task.prompt),), tools=tools)


class TrustsToolCalls(Sums):
    """An unknown tool is more than it can take."""

    def ask(self):
        parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        tools = (ToolSpec("guess", "Guess it.", parameters),)
        return Observation((envgym.Message("user", self.task.prompt),), tools=tools)

    async def step(self, action):
        for call in action.tool_calls:
            results = {"guess": lambda: "no"}[call.name]()
            answer = envgym.Message("tool", results, (), call.id, call.name)
            return [answer], 0.0, False, False, {}
        return await super().step(action)


class WaitsForever(SumsSpec):
    """Its set-up does not end."""

    env_class = Sums
    Config = type("Config", (envgym.EnvConfig,), {"__annotations__": {"call_timeout": float}, "call_timeout": 1.0})

    async def setup(self):
        time.sleep(1000)
