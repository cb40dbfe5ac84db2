"""The controller's end of an engine: the engine interface over a worker handle."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from envgym.engine import EngineInfo, Generation, Request
from envgym.errors import WorkerDied, WorkerError
from envgym.processes.runtime import CALL_SECONDS, Runtime, WorkerHandle

LOOK_SECONDS = 30.0
"""Seconds between two looks whether the engine moves, while requests wait for it."""
PATIENCE = 19
"""Looks in a row that may find that it has not taken a single step: then it hangs, or was left paused. However long an
answer or a queue is, there are steps all the while. (Looks and not seconds, for a run that was stopped for the night
and goes on.)"""
PATIENCE_BESIDE_OTHERS = 3
"""Looks where another engine has moved since: then this one hangs, and it is not the machine that is slow."""


class EngineClient:
    """Implements `Engine` by calling one that runs in a worker.

    An engine that stands still is as good as dead: calls raise `WorkerDied`.
    """

    def __init__(self, handle: WorkerHandle) -> None:
        self.moved_at = -math.inf
        """The loop's time of the last answer, or the last look that found a step."""
        self.others_moved_at: Callable[[], float] = lambda: -math.inf
        """The same of the engines beside it."""
        self._handle = handle
        self._waiting: set[asyncio.Timeout] = set()
        self._watching: asyncio.Task[None] | None = None
        self._still_since = 0.0

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
        time = asyncio.get_running_loop().time
        began, beside = time(), 0
        asking = asyncio.create_task(self._handle.call(method, *args))
        try:
            while not (await asyncio.wait({asking}, timeout=min(LOOK_SECONDS, began + CALL_SECONDS - time())))[0]:
                beside += self.others_moved_at() > began
                if beside > PATIENCE_BESIDE_OTHERS or time() >= began + CALL_SECONDS:
                    raise WorkerDied(f"the engine hangs: {method} did not end within {time() - began:.0f} s")
            answer = asking.result()
        finally:
            asking.cancel()
        self.moved_at = time()
        return answer

    async def _wait_for(self, method: str, *args: Any) -> Any:
        """Make a call that may take as long as it needs while the engine moves."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                answer = await self._handle.call(method, *args)
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
        return PATIENCE_BESIDE_OTHERS if self.others_moved_at() > self._still_since else PATIENCE

    async def _watch(self) -> None:
        """End the calls that wait once the engine stands still."""
        time = asyncio.get_running_loop().time
        steps, still, looking = None, 0, 0.0
        self._still_since = time()
        while self._waiting and still < self._patience:
            await asyncio.sleep(LOOK_SECONDS - looking)
            now, began = steps, time()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    now = await self._handle.call("steps")
            except TimeoutError:
                pass  # it does not even answer
            except WorkerError:
                return  # it is gone, and every call hears of it
            looking = min(time() - began, LOOK_SECONDS)
            if now == steps:
                still += 1
                continue
            self.moved_at = self.moved_at if steps is None else began
            steps, still, self._still_since = now, 0, time()
        for limit in self._waiting:
            limit.reschedule(time())
