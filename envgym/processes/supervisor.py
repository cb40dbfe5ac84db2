"""Workers of which a dead one is replaced."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Generic, TypeVar

from envgym.errors import EnvgymError, WorkerDied

from .cancellation import cancel_all, pause_timeouts, start_task

Member = TypeVar("Member")
MOST_DEATHS = 8
"""Deaths per worker after which no other is started."""


class Supervisor(ABC, Generic[Member]):
    """`members` are the live ones of `count` workers, by their `number`. One that has died is removed, and another is
    started in the background; `note` gets a line. After too many deaths, or if none can be started, there are no more
    replacements. `kind` names the workers in messages."""

    def __init__(self, kind: str, count: int, note: Callable[[str], None]) -> None:
        self.members: list[Member] = []
        self.deaths = 0
        self._kind, self._count, self._note = kind, count, note
        self._replacing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._broken: WorkerDied | None = None
        """The reason for which there are no more replacements."""

    @abstractmethod
    async def _start_again(self, member: Member) -> Member:
        """Close a dead worker, and start another of its number."""

    def _die_too_often(self) -> bool:
        return self.deaths > MOST_DEATHS * self._count

    async def _live_members(self) -> list[Member]:
        """The live workers; waits for a replacement while there is none. Raises `WorkerDied` if there will be none."""
        while not self.members:
            if self._broken is not None:
                raise self._broken
            with pause_timeouts():
                await self._changed.wait()
        return self.members

    def _lose(self, member: Member, reason: str) -> None:
        """Remove a dead worker and start another in the background, unless too many have died."""
        if member not in self.members:  # another call has noticed already
            return
        self.members.remove(member)
        self.deaths += 1
        if self._die_too_often():
            self._break(f"{reason}; {self.deaths} {self._kind} have died: see their logs")
            return
        self._note(f"{reason}; starting another")
        start_task(self._replace(member, reason), self._replacing)

    async def _replace(self, member: Member, reason: str) -> None:
        try:
            self._add(await self._start_again(member))
        except (EnvgymError, OSError) as error:
            self._break(f"{reason}; another one could not be started: {error}")

    def _add(self, member: Member) -> None:
        self.members.append(member)
        self.members.sort(key=attrgetter("number"))
        self._notify()

    def _break(self, reason: str) -> None:
        self._broken = WorkerDied(reason)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _stop_replacing(self) -> None:
        await cancel_all(self._replacing)
