"""The controller's end of an engine: the engine interface over a worker handle."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from envgym.engine import EngineInfo, Generation, HostedEngine, Request
from envgym.errors import WorkerDied, WorkerError
from envgym.processes.runtime import CALL_SECONDS, Message, Result, WorkerHandle

LOOK_SECONDS = 30.0
"""Seconds between two checks of the engine's step counter, while requests wait for it."""
PATIENCE = 19
"""Consecutive checks without a single step after which the engine hangs, or was left paused. Steps are taken however
long a completion or a queue is. (Checks and not seconds, for a run that was suspended overnight and continues.)"""
PATIENCE_BESIDE_OTHERS = 3
"""Such checks where another engine has taken steps meanwhile: then this one hangs, and the machine is not slow."""


class EngineClient(WorkerHandle[HostedEngine]):
    """Implements `Engine` by calling an engine in a worker. Calls raise `WorkerDied` once that engine hangs."""

    def __init__(self, handle: WorkerHandle[HostedEngine]) -> None:
        self.moved_at = -math.inf
        """The loop's time of the last answer, or of the last check that saw a step."""
        self.others_moved_at: Callable[[], float] = lambda: -math.inf
        """The latest such time of the pool's other engines."""
        self._handle = handle
        self._waiting: set[asyncio.Timeout] = set()
        self._watching: asyncio.Task[None] | None = None
        self._idle_since = 0.0

    async def info(self) -> EngineInfo:
        return await self.call(lambda engine: engine.info())

    async def steps(self) -> int:
        return await self.call(lambda engine: engine.steps())

    async def generate(self, request: Request) -> Generation:
        return await self._wait_for(self._handle.call(lambda engine: engine.generate(request)))

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return await self._wait_for(self._handle.call(lambda engine: engine.score(token_ids)))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._handle.close()

    async def send(self, message: Message) -> Any:
        """Run a method. Raises `WorkerDied` if the engine hangs: after `CALL_SECONDS`, or earlier if other engines have
        moved meanwhile."""
        time = asyncio.get_running_loop().time
        start, looks = time(), 0
        calling = asyncio.create_task(self._handle.send(message))
        try:
            while not (await asyncio.wait({calling}, timeout=min(LOOK_SECONDS, start + CALL_SECONDS - time())))[0]:
                looks += self.others_moved_at() > start
                if looks > PATIENCE_BESIDE_OTHERS or time() >= start + CALL_SECONDS:
                    raise WorkerDied(f"the engine hangs: {message[0]} did not end within {time() - start:.0f} s")
            answer = calling.result()
        finally:
            calling.cancel()
        self.moved_at = time()
        return answer

    async def _wait_for(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Await a call that has no deadline as long as the engine takes steps; then it raises `WorkerDied`."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                answer = await call
                self.moved_at = asyncio.get_running_loop().time()
                return answer
        except TimeoutError:
            if not limit.expired():
                raise
            minutes = LOOK_SECONDS * (self._patience + 1) / 60
            raise WorkerDied(
                f"the engine has taken no step for {minutes:.0f} minutes or more: it hangs, or was left paused"
            ) from None
        finally:
            self._waiting.discard(limit)

    @property
    def _patience(self) -> int:
        return PATIENCE_BESIDE_OTHERS if self.others_moved_at() > self._idle_since else PATIENCE

    async def _watch(self) -> None:
        """End the waiting calls once the engine takes no more steps."""
        time = asyncio.get_running_loop().time
        steps, idle, look_seconds = None, 0, 0.0
        self._idle_since = time()
        while self._waiting and idle < self._patience:
            await asyncio.sleep(LOOK_SECONDS - look_seconds)
            current, start = steps, time()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    current = await self._handle.call(lambda engine: engine.steps())
            except TimeoutError:
                pass  # no answer counts as no step
            except WorkerError:
                return  # the engine is gone: every call fails by itself
            look_seconds = min(time() - start, LOOK_SECONDS)
            if current == steps:
                idle += 1
                continue
            self.moved_at = self.moved_at if steps is None else start
            steps, idle, self._idle_since = current, 0, time()
        for limit in self._waiting:
            limit.reschedule(time())
