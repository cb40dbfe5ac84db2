"""The controller's end of an engine: the engine interface over a worker handle."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from envgym.errors import WorkerDied, WorkerError
from envgym.workers.runtime import CALL_SECONDS, Runtime, WorkerHandle

from .base import EngineInfo, Generation, Request

LOOK_SECONDS = 30.0
"""Seconds between two looks whether the engine moves, while requests wait for it."""
PATIENCE = 20
"""Looks in a row that may find that it has not taken a single step: then it hangs, or was left paused. However long an
answer or a queue is, there are steps all the while. (Looks and not seconds, for a run that was stopped for the night
and goes on.)"""


class EngineClient:
    """Implements `Engine` by calling one that runs in a worker.

    An engine that stands still is as good as dead: calls raise `WorkerDied`.
    """

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self._waiting: set[asyncio.Timeout] = set()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, runtime: Runtime, target: str, kwargs: Mapping[str, Any], environ: Mapping[str, str], name: str = "engine"
    ) -> EngineClient:
        """Start the engine class `target` as a worker of this name."""
        return cls(await runtime.start(target, kwargs, name=name, environ=environ))

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._control("info")
        return info

    async def steps(self) -> int:
        steps: int = await self._control("steps")
        return steps

    async def generate(self, request: Request) -> Generation:
        generation: Generation = await self._wait_for("generate", request)
        return generation

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        scores: list[float] = await self._wait_for("score", token_ids)
        return scores

    async def tell(self, method: str, *args: Any) -> Any:
        """Make a call of `HostedEngine`."""
        return await self._control(method, *args)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._handle.close()

    async def _control(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_SECONDS) as limit:
                return await self._handle.call(method, *args)
        except TimeoutError:
            if not limit.expired():
                raise
            raise WorkerDied(f"the engine hangs: {method} did not end within {CALL_SECONDS:.0f} s") from None

    async def _wait_for(self, method: str, *args: Any) -> Any:
        """Make a call that may take as long as it needs while the engine moves."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                return await self._handle.call(method, *args)
        except TimeoutError:
            if not limit.expired():
                raise
            minutes = LOOK_SECONDS * PATIENCE / 60
            raise WorkerDied(
                f"the engine has taken no step for {minutes:.0f} minutes or more: it hangs, or was left paused"
            ) from None
        finally:
            self._waiting.discard(limit)

    async def _watch(self) -> None:
        """End the calls that wait once the engine stands still."""
        steps, still = None, 0
        while self._waiting and still < PATIENCE:
            await asyncio.sleep(LOOK_SECONDS)
            now = steps
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    now = await self._handle.call("steps")
            except TimeoutError:
                pass  # it does not even answer
            except WorkerError:
                return  # it is gone, and every call hears of it
            still = still + 1 if now == steps else 0
            steps = now
        for limit in self._waiting:
            limit.reschedule(asyncio.get_running_loop().time())
