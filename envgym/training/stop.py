"""The user's wish that a run stops, and waiting that heeds it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The user asked the run to stop (Ctrl-C)."""


class Stop(asyncio.Event):
    """Set when the user has asked the run to stop."""

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` comes to. Raises `Stopped`, and cancels it, where the stop is asked for first."""
        job, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([job, stop], return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                raise Stopped
            return job.result()
        finally:
            job.cancel()
            stop.cancel()
            await asyncio.gather(job, stop, return_exceptions=True)
