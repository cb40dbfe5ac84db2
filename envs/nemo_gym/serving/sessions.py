"""Sessions by cookie: one episode each.

Their agents keep the cookies of the latest response alone, so every response sets the cookie again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from .playing import Playing

COOKIE = "envgym_session"
IDLE_SECONDS = 3600.0
"""After so long without a request a session is closed. Nothing is heard while the policy thinks: their agents send no
heartbeat."""
SWEEP_SECONDS = 30.0
CURRENT: ContextVar[str] = ContextVar("CURRENT")
"""The session of the request that is being answered."""


@dataclass(slots=True)
class Session:
    """An episode in play. Their agents may call tools side by side: `lock` lets one at a time step."""

    playing: Playing
    used: float
    calls: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The sessions of one environment, by the value of their cookie."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._opening = 0

    def new_id(self) -> str:
        return secrets.token_urlsafe(24)

    @property
    def full(self) -> bool:
        return len(self._sessions) + self._opening >= self._most

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Hold a place while an episode is posed, which may take its time."""
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    async def put(self, id: str, playing: Playing) -> None:
        """Begin an episode; one that was there under the same cookie is given up."""
        old = self._sessions.pop(id, None)
        self._sessions[id] = Session(playing, time.monotonic())
        if old is not None:
            await old.playing.close()

    def get(self, id: str) -> Session | None:
        session = self._sessions.get(id)
        if session is not None:
            session.used = time.monotonic()
        return session

    async def close(self, id: str) -> None:
        session = self._sessions.pop(id, None)
        if session is not None:
            await session.playing.close()

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """While this lasts, sessions that nobody uses are closed; at its end all are."""

        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                old = time.monotonic() - IDLE_SECONDS
                idle = [id for id, one in self._sessions.items() if one.used < old and not one.lock.locked()]
                for id in idle:
                    await self.close(id)

        sweeping = asyncio.create_task(sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping
            for id in list(self._sessions):
                await self.close(id)
