"""Turns of engines and models that share GPUs: while one side works, the memory of the other is on the host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from envgym.engines.pool import EnginePool
from envgym.workers.group import WorkerGroup


class Turns:
    """Whose turn it is. Nothing happens where no role shares GPUs with the engines.

    `engines`, to sample: models go, engines come back. `models`, to learn, score or save: engines sleep, models come.
    New weights are handed over in between, `hand_over`: optimizers go, engines take their weights' memory back and are
    given them, the actor goes, and only then they take memory for their cache.
    """

    def __init__(self, pool: EnginePool, roles: dict[str, WorkerGroup], *, keeps_weights: bool) -> None:
        self._pool = pool
        self._roles = roles
        self._keeps_weights = keeps_weights
        self._sampling = False

    async def models(self, *, for_new_weights: bool = False) -> None:
        """Let the models have the memory. `for_new_weights`: what the engines hold will not be used again."""
        if not self._roles or not self._sampling:
            return
        await self._pool.tell("sleep", 2 if for_new_weights and not self._keeps_weights else 1)
        await asyncio.gather(*(group.on_all("onload") for group in self._roles.values()))
        self._sampling = False

    async def engines(self) -> None:
        """Let the engines have the memory."""
        if self._roles and not self._sampling:
            await self.hand_over(None)

    async def hand_over(self, send: Callable[[], Awaitable[None]] | None) -> None:
        """Let the engines have the memory, and new weights by `send`, if they are to have some."""
        if self._roles:
            await asyncio.gather(*(group.on_all("offload", role == "actor") for role, group in self._roles.items()))
            await self._pool.tell("wake", "weights")
        if send is not None:
            await send()
        if self._roles:
            if "actor" in self._roles:
                await self._roles["actor"].on_all("offload", False)
            await self._pool.tell("wake", "cache")
            self._sampling = True

    @asynccontextmanager
    async def actor(self) -> AsyncIterator[None]:
        """The actor has its weights within, whoever's turn it is."""
        away = self._sampling and "actor" in self._roles
        if away:
            await self._roles["actor"].on_all("onload")
        try:
            yield
        finally:
            if away:
                await self._roles["actor"].on_all("offload", False)
