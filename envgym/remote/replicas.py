"""The servers of one environment: which of them takes the next session, and which are left out for a while."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

from envgym.errors import ConfigError

from .access import Address
from .leases import Leases
from .transport import Full, RemoteError, Transport, result_of
from .wire import VERSION, EnvDescription, EnvList

CONNECT_SECONDS = 30.0
"""How long a server may take to say what it serves."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds that a server which is down is left out; doubled each time it is found so."""

logger = logging.getLogger(__name__)


class Replica:
    """One server of the environment, from one event loop. It is given sessions in proportion to its room and `weight`.

    Our episodes hold `taken` of the `room` places we think it has for us (None: not known). `stated_room` is what it
    said it has; others may use it too.
    """

    def __init__(self, address: Address, transport: Transport, weight: float = 1.0) -> None:
        self.address = address
        self.transport = transport
        self.weight = weight
        self.leases = Leases(self.transport, self._fell_silent)
        self.description: EnvDescription | None = None
        self.expected: EnvDescription | None = None
        """What it must serve, where that is known."""
        self.on_room: Callable[[], None] = lambda: None
        """Called where it may have more places than before."""
        self.taken = 0
        self.room: int | None = None
        self.stated_room: int | None = None
        self.down = False
        self.try_at = 0.0
        self._pause = FIRST_PAUSE
        self._asking: asyncio.Task[EnvDescription] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def describe(self, patience: float = 0.0) -> EnvDescription:
        """What the server says of the environment; asked once, and again when it was down. Raises `EnvgymError`."""
        if self.description is not None:
            return self.description
        if self._asking is None:  # whoever else wants it waits for this one request
            self._asking = asyncio.create_task(self._describe(patience))
            self._asking.add_done_callback(self._described)
        what = f"{self.address}: the connection was closed here"
        return await result_of(self._asking, RemoteError("connection", what, retryable=True))

    async def _describe(self, patience: float) -> EnvDescription:
        seconds = CONNECT_SECONDS + patience
        served = await self.transport.ask(EnvList, "GET", "/v1/envs", seconds=seconds, patience=patience)
        found = self._choose(served)
        if self.expected is not None:
            check_same(self.expected, found, self.address)
        self.description = found
        self.leases.seconds = served.lease_seconds
        self.room = self.stated_room = min(served.max_sessions, found.concurrency or served.max_sessions)
        return found

    def _described(self, asking: asyncio.Task[EnvDescription]) -> None:
        self._asking = None
        if not asking.cancelled():
            asking.exception()  # whoever asked may have gone

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

    @property
    def load(self) -> float:
        """The share of its places that is taken, by its weight."""
        return self.taken / ((self.room or 1) * self.weight)

    def is_up(self) -> None:
        """It answered."""
        was_down, self.down, self._pause = self.down, False, FIRST_PAUSE
        if was_down:
            self.on_room()

    def is_down(self) -> None:
        """It cannot be reached, or does not work: leave it out for a while, and then ask anew what it serves."""
        now = asyncio.get_running_loop().time()
        self.description = None
        if self.down and now < self.try_at <= now + LONGEST_PAUSE:
            return  # one of many sessions that find it so
        if not self.down:
            logger.warning("%s cannot be reached, or does not work", self.address)
        self.down = True
        self.try_after(self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def try_after(self, seconds: float) -> None:
        """Leave it out for so long; then whoever waits for a place may try it."""
        loop = asyncio.get_running_loop()
        self.try_at = loop.time() + seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self.try_at + 0.01, self.on_room)  # timers may be a little early

    def _fell_silent(self, seconds: float) -> None:
        self.is_down()
        self.transport.give_up(seconds)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self.leases.close()
        await self.transport.close()


class Replicas:
    """Spreads sessions over the servers by the share of their places that is taken."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = list(replicas)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._growing: dict[Replica, asyncio.TimerHandle] = {}
        for replica in replicas:
            replica.on_room = self._wake

    async def connect(self, seconds: float) -> EnvDescription:
        """Ask every server what it serves, all at once. Those that do not answer are left out for a while.

        Raises `EnvgymError` where none answers, and where they do not serve the same.
        """
        asked = [asyncio.create_task(replica.describe()) for replica in self._replicas]
        try:
            await asyncio.wait(asked, timeout=seconds)
        finally:  # also where whoever connects is cancelled: nothing of it goes on
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        for task in asked:
            if not task.cancelled():
                task.exception()  # the first that cannot be mended is told
        found: list[EnvDescription] = []
        failures: dict[Replica, RemoteError] = {}
        for replica, task in zip(self._replicas, asked, strict=True):
            try:
                if task.cancelled():
                    what = f"no answer within {seconds:g} s; is the server well, and reachable from here?"
                    raise RemoteError("timeout", f"{replica.address}: {what}", retryable=True)
                found.append(task.result())
                check_same(found[0], found[-1], replica.address)
            except RemoteError as error:
                if not error.retryable:
                    raise
                failures[replica] = error
        if not found:
            raise next(iter(failures.values()))
        for replica in self._replicas:
            replica.expected = found[0]  # also of one that answers later
        for replica in failures:
            replica.is_down()
        return found[0]

    @property
    def room(self) -> int | None:
        """Sessions that the servers take at once, all together, as far as they said; None: not known."""
        rooms = [replica.stated_room for replica in self._replicas if replica.stated_room is not None]
        return sum(rooms) if rooms else None

    @property
    def down(self) -> list[Replica]:
        """Those that could not be reached."""
        return [replica for replica in self._replicas if replica.down]

    def others(self, replica: Replica, failed: Collection[Replica] = ()) -> bool:
        """Whether there is another server to turn to, which has not `failed`."""
        return any(not other.down and other not in failed for other in self._replicas if other is not replica)

    def unasked(self, failed: Collection[Replica]) -> bool:
        """Whether there is one, up or not, that has not `failed`."""
        return any(replica not in failed for replica in self._replicas)

    def any_up(self, failed: Collection[Replica] = ()) -> Replica:
        """A server for what each of them can answer (tasks, judgements), if possible one that has not `failed`. Raises
        `RemoteError` where there is none any more."""
        if not self._replicas:
            raise RemoteError("connection", "the last server has gone", retryable=True)
        return min(
            self._replicas,
            key=lambda replica: (replica in failed, replica.down, replica.down and replica.try_at, replica.taken),
        )

    async def take(self) -> Replica:
        """A place on the server with the smallest share of its places taken; waits until there is one.

        Where every server is down one of them is given all the same: who opens a session there finds out.
        """
        while (found := self._free()) is None:
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
        return self._replicas

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
        await asyncio.gather(*(replica.close() for replica in self._replicas))


def check_same(expected: EnvDescription, found: EnvDescription, address: Address) -> None:
    """Raise `RemoteError` where the tasks of a split are others than those `expected`; warn of other code."""
    sizes, others = ({name: split.size for name, split in env.splits.items()} for env in (expected, found))
    if sizes != others:
        what = f"serves other tasks than it did, or than the other servers do ({others}, not {sizes})"
        raise RemoteError("refused", f"{address} {what}", retryable=False)
    if expected.fingerprint.get("code") != found.fingerprint.get("code"):
        logger.warning("%s runs other code of the environment than before, or than the other servers", address)
