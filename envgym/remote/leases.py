"""Keeping sessions alive while their episodes wait for the policy: one heartbeat for all sessions on a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from .encoding import encode
from .transport import RemoteError, Transport
from .wire import MAX_HEARTBEAT, Alive, Heartbeat

logger = logging.getLogger(__name__)


class Leases:
    """The sessions that are wanted on one server. Those not heard of for a third of the lease are told of.

    A server that answers neither requests nor heartbeats for a whole lease is given up (`on_silence`): frozen, it
    would hold every episode for as long as a step may take. The task lives while there are sessions.
    """

    def __init__(self, transport: Transport, on_silence: Callable[[float], None]) -> None:
        self.seconds = 60.0
        self._transport = transport
        self._on_silence = on_silence
        self._used: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._used)

    def renew(self, session: str) -> None:
        """A request for the session is on its way, or was answered. The first begins its lease."""
        self._used[session] = asyncio.get_running_loop().time()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat())

    def end(self, session: str) -> None:
        """The session is wanted no more."""
        self._used.pop(session, None)
        if not self._used and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Tell the server nothing more."""
        self._used.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(self.seconds / 6)
            idle = [session for session, used in self._used.items() if loop.time() - used > self.seconds / 3]
            try:
                for start in range(0, len(idle), MAX_HEARTBEAT):
                    await self._tell(idle[start : start + MAX_HEARTBEAT])
            except RemoteError as error:
                logger.debug("a heartbeat failed: %s", error)
                silence = loop.time() - max(began, self._transport.last_heard)
                if silence > self.seconds:
                    self._on_silence(silence)
                    began = loop.time()

    async def _tell(self, sessions: Sequence[str]) -> None:
        """Renew the leases of `sessions`; of one that the server does not know, its next step will hear."""
        heartbeat = Heartbeat(session_ids=tuple(sessions))
        self._transport.counters.heartbeats += 1
        answer = await self._transport.ask(
            Alive, "POST", "/v1/sessions/heartbeat", encode(heartbeat), seconds=max(self.seconds / 3, 1.0)
        )
        now = asyncio.get_running_loop().time()
        for session in answer.alive:
            if session in self._used:
                self._used[session] = now
