"""The servers of one environment: which of them takes the next session, which are left out for a while, and the
heartbeats that keep sessions alive while their episodes wait for the policy."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from pydantic import BaseModel

from envgym.errors import ConfigError, EnvgymError
from envgym.net.retries import pauses
from envgym.net.shared_calls import SharedCalls

from .access import Address
from .encoding import encode
from .transport import ENVS, Full, RemoteError, Transport
from .wire import MAX_HEARTBEAT, VERSION, Alive, EnvDescription, EnvList, Heartbeat, Method

CONNECT_SECONDS = 30.0
"""Time limit for a server to say what it serves."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds that a server which is down is left out; doubled each time it is found so."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class Leases:
    """The sessions that are wanted on one server. A heartbeat renews those without a request for a third of the lease.

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
                silence = loop.time() - max(began, self._transport.last_answer)
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


class Replica:
    """One server of the environment, from one event loop. It is given sessions in proportion to its room and `weight`.

    Our episodes hold `taken` of the `room` places we think it has for us (None: not known). `stated_room` is what it
    stated; others may use it too.
    """

    def __init__(self, address: Address, transport: Transport, weight: float = 1.0, quota: int | None = None) -> None:
        self.address = address
        self.transport = transport
        self.weight = weight
        self.is_retired = False
        """It gets no new sessions, and is closed once those it has have ended."""
        self._quota = quota
        self.leases = Leases(self.transport, self._fell_silent)
        self.description: EnvDescription | None = None
        self.expected: EnvDescription | None = None
        """The description it must agree with, where that is known."""
        self.on_room: Callable[[], None] = lambda: None
        """Called where it may have more places than before."""
        self.taken = 0
        self.room: int | None = None
        self.stated_room: int | None = None
        self.down = False
        self.try_at = 0.0
        self._pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE)
        self._asking: SharedCalls[str, EnvDescription] = SharedCalls()
        self._timer: asyncio.TimerHandle | None = None

    async def describe(self, patience: float = 0.0) -> EnvDescription:
        """The server's description of the environment; asked once, and again when it was down. Raises `EnvgymError`."""
        if self.description is not None:
            return self.description
        closed = RemoteError("connection", f"{self.address}: the connection was closed here")
        return await self._asking.result(ENVS, lambda: self._describe(patience), closed=closed)

    async def _describe(self, patience: float) -> EnvDescription:
        seconds = CONNECT_SECONDS + patience
        served = await self.transport.ask(EnvList, "GET", ENVS, seconds=seconds, patience=patience)
        found = self._choose(served)
        if self.expected is not None:
            check_same(self.expected, found, self.address)
        self.description = found
        self.leases.seconds = served.lease_seconds
        rooms = (served.max_sessions, found.concurrency, self._quota)
        self.room = self.stated_room = min(room for room in rooms if room is not None)
        return found

    def _choose(self, served: EnvList) -> EnvDescription:
        if served.version != VERSION:
            raise ConfigError(
                f"{self.address} speaks version {served.version} of the protocol, this envgym version {VERSION}: "
                "install the same envgym on both sides"
            )
        found = [env for env in served.envs if self.address.name in ("", env.name)]
        if len(found) != 1:
            known = ", ".join(f"{self.address.server}/{env.name}" for env in served.envs)
            raise ConfigError(f"{self.address} does not name one of the server's environments; there is {known}")
        return found[0]

    async def ask(
        self, model: type[B], method: Method, path: str, body: bytes | None, *, seconds: float, patience: float
    ) -> B:
        """The server's answer, as of its transport. An error of the server, or on the way to it, leaves it out."""
        try:
            answer = await self.transport.ask(model, method, path, body, seconds=seconds, patience=patience)
        except EnvgymError as error:
            if isinstance(error, RemoteError) and error.kind in ("connection", "server", "timeout"):
                self.mark_down()
            else:
                self.mark_up()
            raise
        self.mark_up()
        return answer

    @property
    def load(self) -> float:
        """The share of its places that is taken, by its weight."""
        return self.taken / ((self.room or 1) * self.weight)

    def mark_up(self) -> None:
        """It answered."""
        if self.down:
            self.down, self._pauses = False, pauses(FIRST_PAUSE, LONGEST_PAUSE)
            self.on_room()

    def mark_down(self) -> None:
        """It cannot be reached, or does not work: leave it out for a while, and then ask anew what it serves."""
        now = asyncio.get_running_loop().time()
        self.description = None
        if self.down and now < self.try_at <= now + LONGEST_PAUSE:
            return  # one of many sessions that find it so
        if not self.down:
            logger.warning("%s cannot be reached, or does not work", self.address)
        self.down = True
        self.try_after(next(self._pauses))

    def try_after(self, seconds: float) -> None:
        """Leave it out for so long; then whoever waits for a place may try it."""
        loop = asyncio.get_running_loop()
        self.try_at = loop.time() + seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self.try_at + 0.01, self.on_room)  # timers may be a little early

    def _fell_silent(self, seconds: float) -> None:
        self.mark_down()
        self.transport.give_up(seconds)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._asking.close()
        await self.leases.close()
        await self.transport.close()


class Replicas:
    """Spreads sessions over the servers by the share of their places that is taken. Servers may be added and retired.

    Where none is there, the next one is waited for: `wait` seconds from when the last one was retired.
    """

    def __init__(self, replicas: Sequence[Replica], wait: float = 0.0) -> None:
        self._replicas = list(replicas)
        self.expected: EnvDescription | None = None
        """The first server's description, with which the others must agree."""
        self._wait = wait
        self._none_since = asyncio.get_running_loop().time()
        self._added = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._growing: dict[Replica, asyncio.TimerHandle] = {}
        for replica in replicas:
            replica.on_room = self._wake

    async def connect(self, seconds: float) -> EnvDescription:
        """Ask every server what it serves, all at once. Those that do not answer are left out for a while.

        Raises `EnvgymError` where none answers, and where they do not serve the same.
        """

        async def describe(replica: Replica) -> EnvDescription:
            try:
                async with asyncio.timeout(seconds):
                    return await replica.describe()
            except TimeoutError:
                what = f"no answer within {seconds:g} s; is the server well, and reachable from here?"
                raise RemoteError("timeout", f"{replica.address}: {what}") from None

        descriptions: list[EnvDescription] = []
        failures: dict[Replica, RemoteError] = {}
        answers = await asyncio.gather(*map(describe, self._replicas), return_exceptions=True)
        for replica, answer in zip(self._replicas, answers, strict=True):
            if isinstance(answer, RemoteError) and answer.retryable:
                failures[replica] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                descriptions.append(answer)
                check_same(descriptions[0], answer, replica.address)
        if not descriptions:
            raise next(iter(failures.values()))
        self.expected = descriptions[0]
        for replica in self._replicas:
            replica.expected = self.expected  # also of one that answers later
        for replica in failures:
            replica.mark_down()
        return self.expected

    def add(self, replica: Replica) -> None:
        """Take in one more server, which has been described. Raises `RemoteError` where it has other tasks."""
        assert replica.description is not None
        self.expected = replica.expected = self.expected or replica.description
        check_same(self.expected, replica.description, replica.address)
        replica.on_room = self._wake
        self._replicas.append(replica)
        self._added.set()
        self._close_retired()
        self._wake()

    def retire(self, replica: Replica) -> None:
        """Give a server no new sessions."""
        replica.is_retired = True
        if not self.anyone:
            self._none_since = asyncio.get_running_loop().time()
        self._close_retired()
        self._wake()

    def _close_retired(self) -> None:
        for replica in [replica for replica in self._replicas if replica.is_retired]:
            if replica.taken == 0 and not replica.transport.is_busy:
                self._replicas.remove(replica)
                closing = asyncio.create_task(replica.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    @property
    def all(self) -> tuple[Replica, ...]:
        """The servers there are, those among them that have been retired and still hold sessions."""
        return tuple(self._replicas)

    @property
    def anyone(self) -> bool:
        """Tell whether a server is there."""
        return bool(self._there)

    async def ready(self) -> None:
        """Wait until a server is there. Raises `RemoteError` where none has been for `wait` seconds."""
        while not self.anyone:
            self._added.clear()
            try:
                async with asyncio.timeout_at(self._none_since + self._wait):
                    await self._added.wait()
            except TimeoutError:
                if not self.anyone:
                    what = f"no server has been registered for {self._wait:g} s"
                    raise RemoteError("no_server", what) from None

    @property
    def room(self) -> int | None:
        """Sessions that the servers take at once, all together, as far as is known (None: not at all)."""
        rooms = [replica.stated_room for replica in self._there if replica.stated_room is not None]
        return sum(rooms) if rooms else None

    @property
    def down(self) -> list[Replica]:
        """Those that could not be reached."""
        return [replica for replica in self._there if replica.down]

    def others(self, replica: Replica, failed: Collection[Replica] = ()) -> bool:
        """Tell whether there is another server to turn to, which has not `failed`."""
        return any(not other.down and other not in failed for other in self._there if other is not replica)

    def unasked(self, failed: Collection[Replica]) -> bool:
        """Tell whether there is one, up or not, that has not `failed`."""
        return any(replica not in failed for replica in self._there)

    def any_up(self, failed: Collection[Replica] = ()) -> Replica:
        """A server for what each of them can answer (tasks, judgements), if possible one that has not `failed`."""
        return min(
            self._there,
            key=lambda replica: (replica in failed, replica.down, replica.down and replica.try_at, replica.taken),
        )

    async def take(self) -> Replica:
        """A place on the server with the smallest share of its places taken; waits until there is one.

        Where every server is down one of them is given all the same: who opens a session there finds out. Raises
        `RemoteError` as `ready` does.
        """
        while True:
            await self.ready()
            if (found := self._free()) is not None:
                break
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # the place goes to another
                raise
        found.taken += 1
        return found

    def leave(self, replica: Replica) -> None:
        """Give a place back."""
        replica.taken -= 1
        self._close_retired()
        self._next()

    def refused(self, replica: Replica, full: Full) -> None:
        """The server has no room for one more, since others use it too: give the place back, keep to those that are
        held, and try more in a while."""
        replica.taken -= 1
        replica.room = replica.taken
        if replica not in self._growing:
            self._grow_after(full.retry_after, replica)

    def _grow_after(self, seconds: float, replica: Replica) -> None:
        def grow() -> None:
            del self._growing[replica]
            room, limit = replica.room, replica.stated_room
            if room is None or limit is None or room >= limit:
                return
            replica.room = min(limit, room + max(1, room // 4))
            for _ in range(replica.room - room):
                self._next()
            self._grow_after(seconds, replica)

        self._growing[replica] = asyncio.get_running_loop().call_later(seconds, grow)

    @property
    def _there(self) -> Sequence[Replica]:
        """Those that may be given a session, if only to find out how they are."""
        return [replica for replica in self._replicas if not replica.is_retired]

    def _free(self) -> Replica | None:
        now = asyncio.get_running_loop().time()
        ready = [replica for replica in self._there if not replica.down or replica.try_at <= now]
        free = [replica for replica in ready or self._there if replica.room is None or replica.taken < replica.room]
        if not free:
            return None
        best = min(free, key=lambda replica: replica.load)
        if best.down:  # one session finds out how it is; the others go elsewhere meanwhile
            best.try_after(2 * LONGEST_PAUSE)
        return best

    def _wake(self) -> None:
        for _ in range(len(self._waiting)):
            self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def close(self) -> None:
        for timer in self._growing.values():
            timer.cancel()
        self._growing.clear()
        await asyncio.gather(*(replica.close() for replica in self._replicas), *self._closing)


def check_same(expected: EnvDescription, found: EnvDescription, address: Address) -> None:
    """Raise `RemoteError` where the tasks of a split are others than those `expected`; warn of other code."""
    problem = ""
    sizes, others = ({name: split.size for name, split in env.splits.items()} for env in (expected, found))
    if sizes != others:
        problem = f"{others}, not {sizes}"
    elif any(
        split.tasks and found.splits[name].tasks not in ("", split.tasks) for name, split in expected.splits.items()
    ):
        problem = "as many, but not the same"
    if problem:
        what = f"serves other tasks than it did, or than the other servers do ({problem})"
        raise RemoteError("refused", f"{address} {what}")
    if expected.fingerprint.get("code") != found.fingerprint.get("code"):
        logger.warning("%s runs other code of the environment than before, or than the other servers", address)
