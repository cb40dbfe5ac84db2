"""Several engines as one: requests are spread over those that live, and one that dies is replaced."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envgym.engine import EngineInfo, Generation, Request
from envgym.errors import EnvgymError, InvalidOutcome, WorkerDied, WorkerError
from envgym.processes.deadline import pause_timeouts

from .client import EngineClient

MOST_FAILURES = 16
"""Requests in a row that may fail before an engine counts as dead: it is idle when it answers only errors, and would be
given every request."""
MOST_DEATHS = 8
"""Deaths, for each engine of the pool, after which another start is not worth it."""
UNEVEN = 1.5
"""Share of the mean load above which an engine is left out, though it has the group's prompt already."""
WEIGHTS = ("begin_weights", "load_bucket", "end_weights")
REMEMBERED = 2**16
"""Conversations and groups whose engine is known."""


@dataclass(eq=False, slots=True)
class Member:
    """An engine that lives: how many requests it works on, and how many in a row have failed."""

    number: int
    client: EngineClient
    in_flight: int = 0
    failures: int = 0


class EnginePool:
    """Implements `Engine` by `count` engines that `start` starts, by their number.

    A conversation stays with its engine, and a group's first turns go to the same one unless it has too much to do.
    With `in_turn` requests go round, so that a deterministic run's always meet the same others. What an engine that
    dies was working on fails (`InvalidOutcome`, kind `engine`) and may be tried again. Another one is started in its
    place, and sampled from once `join` has given it the weights of the others; while there is none, requests wait.
    Calls raise `WorkerDied` once no more are started.
    """

    def __init__(
        self,
        start: Callable[[int], Awaitable[EngineClient]],
        clients: Sequence[EngineClient],
        *,
        in_turn: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.members: list[Member] = []
        self.join: Callable[[EngineClient], Awaitable[None]] | None = None
        self.deaths = 0
        self._start = start
        self._count = len(clients)
        self._in_turn = in_turn
        self._note = note
        self._asked = 0
        self._of: OrderedDict[str, Member] = OrderedDict()
        self._replacing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._broken: WorkerDied | None = None
        for number, client in enumerate(clients):
            self._add(number, client)

    @classmethod
    async def started(cls, start: Callable[[int], Awaitable[EngineClient]], count: int, **settings: Any) -> EnginePool:
        """A pool of `count` engines, ready to sample."""
        return cls(start, await asyncio.gather(*(start(number) for number in range(count))), **settings)

    async def info(self) -> EngineInfo:
        return await (await self._ready())[0].client.info()

    async def steps(self) -> int:
        return sum(await self._each("steps"))

    async def generate(self, request: Request) -> Generation:
        member = await self._chosen(request.id)
        member.in_flight += 1
        try:
            generation = await member.client.generate(request)
        except WorkerDied as error:
            self._lose(member, str(error))
            raise InvalidOutcome("engine", str(error), retryable=True) from None
        except (InvalidOutcome, WorkerError) as error:
            member.failures += 1
            if member.failures == MOST_FAILURES:
                self._lose(member, f"{MOST_FAILURES} requests in a row have failed ({error})")
            raise
        finally:
            member.in_flight -= 1
        member.failures = 0
        return generation

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return await (await self._ready())[0].client.score(token_ids)

    async def probe(self, token_ids: tuple[int, ...]) -> list[list[float]]:
        """`score` by every engine."""
        return await self._each("score", token_ids)

    @property
    def clients(self) -> list[EngineClient]:
        """The engines that live."""
        return [member.client for member in self.members]

    async def tell(self, method: str, *args: Any) -> list[Any]:
        """Make a call of `HostedEngine` to every engine. One that fails at new weights is replaced like one that died:
        half of them are no policy."""
        return await self._each("tell", method, *args, losing=WorkerError if method in WEIGHTS else WorkerDied)

    async def close(self) -> None:
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(member.client.close() for member in self.members))

    # -- who is asked --------------------------------------------------------------------------------------------

    async def _ready(self) -> list[Member]:
        """The engines that live; where there is none, those that will."""
        while not self.members:
            if self._broken is not None:
                raise self._broken
            with pause_timeouts():
                await self._changed.wait()
        return self.members

    async def _chosen(self, request: str) -> Member:
        ready = await self._ready()
        if self._in_turn:
            self._asked += 1
            return ready[(self._asked - 1) % len(ready)]
        conversation = request.rpartition(".")[0]
        if (own := self._of.get(conversation)) is not None:
            if own not in ready:
                raise InvalidOutcome("engine", "the engine that played the turns before has died", retryable=True)
            return own
        group = conversation.rsplit(":", 2)[0]
        mean = sum(member.in_flight for member in ready) / len(ready)
        chosen = self._of.get(group)
        if chosen not in ready or chosen.in_flight > UNEVEN * (mean + 1):
            chosen = min(ready, key=lambda member: member.in_flight)
        for key in (group, conversation):
            self._of[key] = chosen
            self._of.move_to_end(key)
        while len(self._of) > REMEMBERED:
            self._of.popitem(last=False)
        return chosen

    async def _each(self, method: str, *args: Any, losing: type[WorkerError] = WorkerDied) -> list[Any]:
        """Answers of the engines that live, which may be none. One that fails with an error of the kind `losing` is
        replaced."""
        members = list(self.members)
        results = await asyncio.gather(
            *(getattr(member.client, method)(*args) for member in members), return_exceptions=True
        )
        found = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, losing):
                self._lose(member, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                found.append(result)
        return found

    def _add(self, number: int, client: EngineClient) -> None:
        client.others_moved_at = lambda: max(
            (other.moved_at for other in self.clients if other is not client), default=-math.inf
        )
        self.members.append(Member(number, client))
        self.members.sort(key=lambda one: one.number)

    # -- deaths --------------------------------------------------------------------------------------------------

    def _lose(self, member: Member, why: str) -> None:
        if member not in self.members:  # others have told already
            return
        self.members.remove(member)
        self.deaths += 1
        if self.deaths > MOST_DEATHS * self._count:
            self._broken = WorkerDied(f"{why}; {self.deaths} engines have died: see their logs")
            self._tell()
            return
        self._note(f"{why}; starting another")
        task = asyncio.create_task(self._replace(member, why))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, member: Member, why: str) -> None:
        try:
            await member.client.close()
            client = await self._start(member.number)
            if self.join is not None:
                await self.join(client)
        except EnvgymError as error:
            self._broken = WorkerDied(f"{why}; another one could not be started: {error}")
        else:
            self._add(member.number, client)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
