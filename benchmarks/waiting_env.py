"""An environment that mostly waits: its one tool takes a set time. It is envgym's side of `env_latency.py`."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from envgym.env import StepResult
from envgym.env.tools import ToolEnv, ToolEnvConfig
from envgym.types import Action


class WaitingConfig(ToolEnvConfig):
    """Settings of the waiting environment."""

    seconds: float
    """Duration of a call of the tool, in seconds."""
    blocking: bool
    """Whether the tool blocks its thread meanwhile."""


class Waiting(ToolEnv):
    """Ends with the turn that would exceed `max_calls`. Rewards are random, so that members of a group differ and give
    a gradient."""

    Config = WaitingConfig

    def begin(self) -> str:
        return "Go."

    def tools(self) -> list[Any]:
        seconds = self.config.seconds

        def wait() -> str:
            """Wait for a while."""
            time.sleep(seconds)
            return "Done."

        async def wait_aside() -> str:
            await asyncio.sleep(seconds)
            return "Done."

        wait_aside.__name__, wait_aside.__doc__ = wait.__name__, wait.__doc__
        return [wait if self.config.blocking else wait_aside]

    async def step(self, action: Action) -> StepResult:
        observation, _, terminated, truncated, info = await super().step(action)
        # Not by `self.rng`, which the members of a group share the seed of.
        return observation, random.SystemRandom().random(), terminated, truncated, info

    def grade(self, action: Action) -> float:
        raise ValueError(f"the policy should have called the tool, and said {action.text!r}")
