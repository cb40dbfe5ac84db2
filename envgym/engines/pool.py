"""The controller's end of the engines: the engine interface over a worker's handle, and several engines as one.
Requests are distributed over the live engines, and a dead one is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from envgym.engine import EngineInfo, Generation, HostedEngine, Request
from envgym.errors import InvalidOutcome, WorkerDied, WorkerError
from envgym.processes.runtime import CALL_SECONDS, Message, Reference, Result, WorkerHandle, message_of
from envgym.processes.supervisor import Supervisor
from envgym.types import PlacedImage

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

    async def reference(self) -> Reference:
        return await self._handle.reference()

    async def generate(self, request: Request) -> Generation:
        return await self._wait_for(lambda engine: engine.generate(request))

    async def score(self, token_ids: tuple[int, ...], images: tuple[PlacedImage, ...] = ()) -> list[float]:
        if not images:  # engines of other packages may take none
            return await self._wait_for(lambda engine: engine.score(token_ids))
        return await self._wait_for(lambda engine: engine.score(token_ids, images))

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

    async def _wait_for(self, call: Callable[[HostedEngine], Awaitable[Result]]) -> Result:
        """Run a method without a deadline. Raises `WorkerDied` once the engine takes no more steps."""
        try:
            async with asyncio.timeout(None) as limit:
                self._waiting.add(limit)
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                answer = await self._handle.call(call)
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


MOST_FAILURES = 16
"""Consecutive failed requests after which an engine counts as dead: one that answers only errors is always idle, and
would get every request."""
UNEVEN = 1.5
"""Multiple of the mean load above which an engine is skipped though it has cached the group's prompt."""
REMEMBERED = 2**16
"""Conversations and groups whose engine is remembered."""


@dataclass(eq=False, slots=True)
class PoolMember:
    """A live engine, its requests in flight, and its consecutive failures."""

    number: int
    client: EngineClient
    in_flight: int = 0
    failures: int = 0


class EnginePool(Supervisor[PoolMember]):
    """Implements `Engine` by `count` engines; `start` starts the engine of a number.

    A conversation stays with its engine, and the first turns of a group go to the same engine unless it is overloaded.
    `round_robin` distributes requests in turn, so that every batch of a deterministic run is the same. `preferred` is
    the number of the engine that is first among equally loaded ones. The requests in flight on an engine that dies fail
    (`InvalidOutcome`, kind `engine`) and may be retried. A replacement is started, and gets requests once `join` has
    given it the weights of the others; while no engine is live, requests wait. Calls raise `WorkerDied` once no more
    replacements are started. Engines that sleep while models have their GPUs are replaced when the others are awake: at
    other times there is no memory for a new one.
    """

    def __init__(
        self,
        start: Callable[[int], Awaitable[EngineClient]],
        clients: Sequence[EngineClient],
        *,
        round_robin: bool = False,
        preferred: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__("engines", len(clients), note)
        self.join: Callable[[EngineClient], Awaitable[None]] | None = None
        self._start = start
        self._round_robin = round_robin
        self._preferred = preferred
        self._n_requests = 0
        self._assigned: OrderedDict[str, PoolMember] = OrderedDict()
        self._starting = asyncio.Lock()
        """For engines that sleep: held while they do, and while a replacement starts."""
        self._asleep = False
        self._sleeps = False
        self._info: EngineInfo | None = None
        for number, client in enumerate(clients):
            self._add(self._member(number, client))

    @classmethod
    async def start(cls, start: Callable[[int], Awaitable[EngineClient]], count: int, **settings: Any) -> EnginePool:
        """Start `count` engines and return their pool."""
        return cls(start, await asyncio.gather(*(start(number) for number in range(count))), **settings)

    async def info(self) -> EngineInfo:
        if self._info is None:  # that of the replacements too
            self._info = await (await self._live_members())[0].client.info()
        return self._info

    async def generate(self, request: Request) -> Generation:
        """Send a request to one of the engines. Raises `InvalidOutcome`, retryable if the engine has died, and of kind
        `images` if these engines take none."""
        if request.images and not (info := await self.info()).takes_images:
            raise InvalidOutcome("images", f"the engine ({info.kind}) takes no images here: {info.image_advice}")
        member = await self._choose(request.id)
        member.in_flight += 1
        try:
            generation = await member.client.generate(request)
        except WorkerDied as error:
            self._lose(member, str(error))
            raise InvalidOutcome("engine", str(error), retryable=True) from None
        except (InvalidOutcome, WorkerError) as error:
            # A request that an engine refuses is no failure of the engine.
            member.failures += isinstance(error, WorkerError) or error.retryable
            if member.failures == MOST_FAILURES:
                self._lose(member, f"{MOST_FAILURES} requests in a row have failed ({error})")
            raise
        finally:
            member.in_flight -= 1
        member.failures = 0
        return generation

    async def probe(self, token_ids: tuple[int, ...], images: tuple[PlacedImage, ...] = ()) -> list[list[float]]:
        """The log-probabilities of `HostedEngine.score` by every engine."""
        arguments = (token_ids, images) if images else (token_ids,)
        return await self._call_each(lambda client: client.score(*arguments))

    @property
    def clients(self) -> list[EngineClient]:
        """The live engines."""
        return [member.client for member in self.members]

    def on_all(self, call: Callable[[HostedEngine], Awaitable[Result]]) -> Coroutine[Any, Any, list[Result]]:
        """Run a method of every engine; see `WorkerHandle.call`."""
        message = message_of(call)
        return self._call_each(lambda client: client.send(message))

    def load(self, call: Callable[[HostedEngine], Awaitable[Result]]) -> Coroutine[Any, Any, list[Result]]:
        """Run a method that loads weights, on every engine. An engine that fails is replaced like one that died:
        half-loaded weights are unusable."""
        message = message_of(call)
        return self._call_each(lambda client: client.send(message), losing=WorkerError)

    async def sleep(self, level: int) -> None:
        """Let every engine release its device's memory; see `HostedEngine.sleep`."""
        if not self._asleep:
            await self._starting.acquire()
            self._asleep = self._sleeps = True
        await self.on_all(lambda engine: engine.sleep(level))

    async def wake(self, part: str) -> None:
        """Let every engine allocate a part of its memory again; see `HostedEngine.wake`."""
        await self.on_all(lambda engine: engine.wake(part))
        if self._asleep and part == "cache":  # the last part
            self._asleep = False
            self._starting.release()

    async def close(self) -> None:
        await self._stop_replacing()
        await asyncio.gather(*(member.client.close() for member in self.members))

    async def reference(self, number: int, dead: Reference | None) -> Reference:
        """How another process reaches the engine of a number, which for that process has ended if it is the `dead` one:
        that is replaced first. Raises `WorkerDied` if no more replacements are started."""
        while self._broken is None:
            changed = self._changed
            for member in [member for member in self.members if member.number == number]:
                try:
                    if (reference := await member.client.reference()) != dead:
                        return reference
                    reason = f"engine {number} has ended, as seen from a process that rolls out"
                except WorkerDied as error:
                    reason = str(error)
                self._lose(member, reason)
            await changed.wait()
        raise self._broken

    # -- choice of an engine -------------------------------------------------------------------------------------

    async def _choose(self, request_id: str) -> PoolMember:
        """The engine for a request: in turn, if `round_robin`; else that of the conversation's earlier turns, that of
        its group unless it is overloaded, or the least loaded. Raises `InvalidOutcome` if the conversation's engine has
        died."""
        live = await self._live_members()
        if self._round_robin:
            self._n_requests += 1
            return live[(self._n_requests - 1) % len(live)]
        conversation = request_id.rpartition(".")[0]
        if (assigned := self._assigned.get(conversation)) is not None:
            if assigned not in live:
                del self._assigned[conversation]  # its next turn begins anew
                raise InvalidOutcome("engine", "the engine of the earlier turns has died", retryable=True)
            return assigned
        group = conversation.rsplit(":", 2)[0]
        mean = sum(candidate.in_flight for candidate in live) / len(live)
        member = self._assigned.get(group)
        if member not in live or member.in_flight > UNEVEN * (mean + 1):
            member = min(live, key=lambda engine: (engine.in_flight, (engine.number - self._preferred) % self._count))
        for key in (group, conversation):
            self._assigned[key] = member
            self._assigned.move_to_end(key)
        while len(self._assigned) > REMEMBERED:
            self._assigned.popitem(last=False)
        return member

    async def _call_each(
        self, call: Callable[[EngineClient], Awaitable[Result]], losing: type[WorkerError] = WorkerDied
    ) -> list[Result]:
        """The live engines' answers, possibly none. An engine that raises an error of class `losing` is replaced."""
        members = list(self.members)
        results = await asyncio.gather(*(call(member.client) for member in members), return_exceptions=True)
        answers = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, losing):
                self._lose(member, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                answers.append(result)
        return answers

    def _member(self, number: int, client: EngineClient) -> PoolMember:
        client.others_moved_at = lambda: max(
            (engine.moved_at for engine in self.clients if engine is not client), default=-math.inf
        )
        return PoolMember(number, client)

    async def _start_again(self, member: PoolMember) -> PoolMember:
        await member.client.close()
        async with self._starting if self._sleeps else contextlib.nullcontext():
            client = await self._start(member.number)
            if self._sleeps:  # the actor whose weights it gets needs memory too
                await client.call(lambda engine: engine.sleep(1))
                await client.call(lambda engine: engine.wake("weights"))
            if self.join is not None:
                await self.join(client)
            if self._sleeps:
                await client.call(lambda engine: engine.wake("cache"))
        return self._member(member.number, client)
