"""The controller's end of an engine: the engine interface over a worker handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envgym.workers.runtime import Runtime, WorkerHandle

from .base import EngineInfo, Generation, Request


class EngineClient:
    """Implements `Engine` by calling one that runs in a worker."""

    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle

    @classmethod
    async def start(
        cls, runtime: Runtime, target: str, kwargs: Mapping[str, Any], environ: Mapping[str, str]
    ) -> EngineClient:
        """Start the engine class `target` as a worker named `engine`."""
        return cls(await runtime.start(target, kwargs, name="engine", environ=environ))

    async def info(self) -> EngineInfo:
        info: EngineInfo = await self._handle.call("info")
        return info

    async def generate(self, request: Request) -> Generation:
        generation: Generation = await self._handle.call("generate", request)
        return generation

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        scores: list[float] = await self._handle.call("score", token_ids)
        return scores

    async def load_weights(self, path: str, version: int) -> None:
        await self._handle.call("load_weights", path, version)

    async def load_adapter(self, path: str, version: int) -> None:
        await self._handle.call("load_adapter", path, version)

    async def pause(self) -> None:
        await self._handle.call("pause")

    async def resume(self) -> None:
        await self._handle.call("resume")

    async def sleep(self) -> None:
        await self._handle.call("sleep")

    async def wake(self) -> None:
        await self._handle.call("wake")

    async def close(self) -> None:
        await self._handle.close()
