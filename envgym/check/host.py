"""The process in which an environment is examined. One that hangs or crashes takes it along, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
from collections.abc import Mapping
from typing import Any

from envgym.errors import EnvgymError
from envgym.registry import spec
from envgym.remote.client import ServedEnvSpec
from envgym.services import Services, start_services

from . import description, endings, episodes, isolation, latency, leak, repeatability, scores
from .context import Subject
from .play import call_limit
from .report import Finding

GRACE_SECONDS = 3.0
"""How long the event loop may stand still beyond what a call may take before the process ends itself."""


class CheckHost:
    """Answers for one environment, set up for as long as it is looked at. Each method is one group of checks."""

    def __init__(self, name: str, settings: Mapping[str, Any], setup_seconds: float) -> None:
        self._subject = Subject(spec(name, **settings), name, dict(settings))
        self._subject.is_remote = isinstance(self._subject.spec, ServedEnvSpec)
        self._setup_seconds = setup_seconds
        self._open = contextlib.AsyncExitStack()
        self._services: Services | None = None
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> list[str]:
        """Set the environment up. Returns its services' names. Raises `EnvgymError` for what the user can mend."""
        limit = self._setup_seconds
        faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True)  # set-up may hold the loop, within limits
        try:
            async with asyncio.timeout(limit):
                self._services = await self._open.enter_async_context(start_services(self._subject.spec))
        except TimeoutError:
            raise EnvgymError(f"{self._subject.spec.id}: its set-up takes longer than {limit:g} s") from None
        self._beating = asyncio.create_task(self._beat())
        return self._subject.needs_services

    async def description(self) -> list[Finding]:
        return await description.check(self._subject)

    async def episodes(self) -> tuple[list[Finding], bool]:
        """Also whether there is any point in playing more."""
        return await episodes.check(self._subject), episodes.can_go_on(self._subject)

    async def repeatability(self) -> list[Finding]:
        return await repeatability.check(self._subject)

    async def recorded(self, with_spec: bool, with_tasks: bool) -> dict[str, Any]:
        return await repeatability.recorded(self._subject, with_spec, with_tasks)

    async def isolation(self) -> list[Finding]:
        return await isolation.check(self._subject)

    async def latency(self) -> list[Finding]:
        return await latency.check(self._subject)

    async def leak(self) -> list[Finding]:
        return await leak.check(self._subject)

    async def scores(self) -> list[Finding]:
        return await scores.check(self._subject)

    async def endings(self, repeatable: bool) -> list[Finding]:
        return await endings.check(self._subject, repeatable)

    async def left_behind(self) -> list[Finding]:
        """Ends what `open` began."""
        await self._open.aclose()
        return [await endings.left_behind(self._subject)]

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        faulthandler.cancel_dump_traceback_later()
        await self._open.aclose()

    async def _beat(self) -> None:
        """Have the process say where it stands, and end, once the event loop is held for good. This watch needs neither
        the loop nor Python's lock."""
        limit = call_limit(self._subject.spec) + GRACE_SECONDS
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            await asyncio.sleep(limit / 10)
