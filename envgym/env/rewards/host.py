"""A reward function in a process of its own: what runs there."""

from __future__ import annotations

import random
from typing import Any

from envgym.errors import InvalidStep
from envgym.loading import load_function

from .functions import Reward, as_reward, as_rewards, run


class FunctionHost:
    """Calls the function that `target` (`file.py:name`) names. What it returns crosses the wire as plain numbers."""

    def __init__(self, target: str) -> None:
        self._function = load_function(target, "reward function")
        self._name = self._function.__name__

    def ping(self) -> None:
        """A sign of life."""

    async def one(self, arguments: dict[str, Any]) -> Reward:
        return as_reward(await run(self._function, **arguments), self._name)

    async def group(self, columns: dict[str, list[Any]], count: int, seed: int) -> list[Reward | InvalidStep]:
        random.seed(seed)  # the process is the function's own, so that what it draws at random can be repeated
        return as_rewards(await run(self._function, **columns), count, self._name)
