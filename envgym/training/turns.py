"""Timesharing of GPUs between engines and models: while one side works, the memory of the other is on the host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from envgym.engines.pool import EnginePool
from envgym.workers.group import WorkerGroup


class GpuTimeshare:
    """Moves engines and models on and off the GPUs that they share; does nothing where no role shares any.

    `give_to_engines`, to sample: models are offloaded, engines wake. `give_to_models`, to train, score or save: engines
    sleep, models are loaded. `hand_over` sends new weights in between: optimizers are offloaded, engines allocate their
    weights and receive the new ones, the actor is offloaded, and only then engines allocate their cache.
    """

    def __init__(self, pool: EnginePool, roles: dict[str, WorkerGroup], *, keeps_weights: bool) -> None:
        self._pool = pool
        self._roles = roles
        self._keeps_weights = keeps_weights
        self._sampling = False

    async def give_to_models(self, *, for_new_weights: bool = False) -> None:
        """Give the models the memory. `for_new_weights`: the engines need not save weights that will be replaced."""
        if not self._roles or not self._sampling:
            return
        await self._pool.sleep(2 if for_new_weights and not self._keeps_weights else 1)
        await asyncio.gather(*(group.on_all(lambda rank: rank.onload()) for group in self._roles.values()))
        self._sampling = False

    async def give_to_engines(self) -> None:
        """Give the engines the memory."""
        if self._roles and not self._sampling:
            await self.hand_over(None)

    async def hand_over(self, send: Callable[[], Awaitable[None]] | None) -> None:
        """Give the engines the memory, and new weights by `send`, if there are any."""
        if self._roles:
            await asyncio.gather(
                *(
                    group.on_all(lambda rank: rank.offload(role == "actor"))  # noqa: B023
                    for role, group in self._roles.items()
                )
            )
            await self._pool.wake("weights")
        if send is not None:
            await send()
        if self._roles:
            if "actor" in self._roles:
                await self._roles["actor"].on_all(lambda rank: rank.offload(False))
            await self._pool.wake("cache")
            self._sampling = True

    @asynccontextmanager
    async def actor_on_device(self) -> AsyncIterator[None]:
        """Context in which the actor's weights are on the device."""
        is_offloaded = self._sampling and "actor" in self._roles
        if is_offloaded:
            await self._roles["actor"].on_all(lambda rank: rank.onload())
        try:
            yield
        finally:
            if is_offloaded:
                await self._roles["actor"].on_all(lambda rank: rank.offload(False))
