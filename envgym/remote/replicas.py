"""The servers of one environment: which of them gets the next session, which are skipped for a while, and the
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
from envgym.processes.cancellation import start_task

from .access import Address
from .encoding import encode
from .transport import RemoteError, ServerFull, Transport
from .wire import MAX_HEARTBEAT, VERSION, Alive, EnvDescription, EnvList, Heartbeat, Method

CONNECT_SECONDS = 30.0
"""Time limit for a server to list its environments."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
"""Seconds for which a server is skipped; doubled each time that it is still down."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class Leases:
    """The sessions in use on one server. A heartbeat renews those without a request for a third of the lease.

    A server that answers neither requests nor heartbeats for a whole lease is given up (`on_silence`): frozen, it
    would hold every episode for as long as a step may take. The task lives while there are sessions.
    """

    def __init__(self, transport: Transport, on_silence: Callable[[float], None]) -> None:
        self.seconds = 60.0
        self._transport = transport
        self._on_silence = on_silence
        self._last_use: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._last_use)

    def renew(self, session: str) -> None:
        """Note a request for the session, or its answer. The first starts the heartbeats."""
        self._last_use[session] = asyncio.get_running_loop().time()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_heartbeats())

    def end(self, session: str) -> None:
        """Send no more heartbeats for the session."""
        self._last_use.pop(session, None)
        if not self._last_use and self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """Stop all heartbeats."""
        self._last_use.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _send_heartbeats(self) -> None:
        """Renew the leases of idle sessions forever; report a server that has not answered for a lease."""
        loop = asyncio.get_running_loop()
        last_sign = loop.time()
        while True:
            await asyncio.sleep(self.seconds / 6)
            idle = [session for session, used_at in self._last_use.items() if loop.time() - used_at > self.seconds / 3]
            try:
                for start in range(0, len(idle), MAX_HEARTBEAT):
                    await self._renew(idle[start : start + MAX_HEARTBEAT])
            except RemoteError as error:
                logger.debug("a heartbeat failed: %s", error)
                silence = loop.time() - max(last_sign, self._transport.last_answer)
                if silence > self.seconds:
                    self._on_silence(silence)
                    last_sign = loop.time()

    async def _renew(self, sessions: Sequence[str]) -> None:
        """Renew the leases of `sessions`; for an unknown one the next step raises."""
        heartbeat = Heartbeat(session_ids=tuple(sessions))
        self._transport.counters.heartbeats += 1
        answer = await self._transport.ask(
            Alive, "POST", "/v1/sessions/heartbeat", encode(heartbeat), seconds=max(self.seconds / 3, 1.0)
        )
        time = asyncio.get_running_loop().time()
        for session in answer.alive:
            if session in self._last_use:
                self._last_use[session] = time


class Replica:
    """A client of one of the environment's servers, used within one event loop. The server gets sessions in proportion
    to its capacity and `weight`.

    Episodes here hold `in_use` of its slots. `capacity` is the estimate of the slots for this client (None: unknown);
    `stated_capacity` is the server's statement, which other clients may use up.
    """

    def __init__(self, address: Address, transport: Transport, weight: float = 1.0, quota: int | None = None) -> None:
        self.address = address
        self.transport = transport
        self.weight = weight
        self.is_retired = False
        """It gets no new sessions, and is closed after its last one."""
        self._quota = quota
        self.leases = Leases(self.transport, self._give_up)
        self.description: EnvDescription | None = None
        self.expected: EnvDescription | None = None
        """The description that it must agree with, if known."""
        self.on_capacity: Callable[[], None] = lambda: None
        """Called when slots may have become free."""
        self.in_use = 0
        self.capacity: int | None = None
        self.stated_capacity: int | None = None
        self.is_down = False
        self.try_at = 0.0
        self._pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE)
        self._asking: SharedCalls[str, EnvDescription] = SharedCalls()
        self._timer: asyncio.TimerHandle | None = None

    async def describe(self, seconds: float = CONNECT_SECONDS, patience: float = 0.0) -> EnvDescription:
        """The server's description of the environment; requested again after it was down. Raises `EnvgymError`."""
        if self.description is not None:
            return self.description
        closed = RemoteError("connection", f"{self.address}: the connection was closed here")
        return await self._asking.result("", lambda: self._describe(seconds + patience, patience), closed=closed)

    async def _describe(self, seconds: float, patience: float) -> EnvDescription:
        """Ask the server for its description, and store it, the duration of leases and the capacity. `seconds` limits
        one try, `patience` all tries. Raises `EnvgymError` if it is unusable or differs from the expected one."""
        served = await self.transport.ask(EnvList, "GET", "/v1/envs", seconds=seconds, patience=patience)
        description = self._choose(served)
        if self.expected is not None:
            check_same(self.expected, description, self.address)
        self.description = description
        self.leases.seconds = served.lease_seconds
        bounds = (served.max_sessions, description.concurrency, self._quota)
        self.capacity = self.stated_capacity = min(bound for bound in bounds if bound is not None)
        return description

    def _choose(self, served: EnvList) -> EnvDescription:
        """The description of this replica's environment. Raises `ConfigError` for another version, or a name that is
        not one of the server's."""
        if served.version != VERSION:
            raise ConfigError(
                f"{self.address} speaks version {served.version} of the protocol, this envgym version {VERSION}: "
                "install the same envgym on both sides"
            )
        matches = [env for env in served.envs if self.address.name in ("", env.name)]
        if len(matches) != 1:
            addresses = ", ".join(f"{self.address.server}/{env.name}" for env in served.envs)
            raise ConfigError(f"{self.address} does not name one of the server's environments; there is {addresses}")
        return matches[0]

    async def ask(
        self, model: type[B], method: Method, path: str, body: bytes | None, *, seconds: float, patience: float
    ) -> B:
        """The transport's `ask`. An error of the server or the connection marks it as down."""
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
        """The fraction of its slots in use, divided by its weight."""
        return self.in_use / ((self.capacity or 1) * self.weight)

    @property
    def has_free_slot(self) -> bool:
        return self.capacity is None or self.in_use < self.capacity

    def mark_up(self) -> None:
        """Use the server again, after an answer."""
        if self.is_down:
            self.is_down, self._pauses = False, pauses(FIRST_PAUSE, LONGEST_PAUSE)
            self.on_capacity()

    def mark_down(self) -> None:
        """Skip the server for a while, since it cannot be reached or fails; then ask for its description again."""
        time = asyncio.get_running_loop().time()
        self.description = None
        if self.is_down and time < self.try_at <= time + LONGEST_PAUSE:
            return  # another session has already marked it
        if not self.is_down:
            logger.warning("%s cannot be reached, or does not work", self.address)
        self.is_down = True
        self.try_after(next(self._pauses))

    def try_after(self, seconds: float) -> None:
        """Skip the server for `seconds`; then a waiting session may try it."""
        loop = asyncio.get_running_loop()
        self.try_at = loop.time() + seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self.try_at + 0.01, self.on_capacity)  # timers may be a little early

    def _give_up(self, seconds: float) -> None:
        self.mark_down()
        self.transport.give_up(seconds)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._asking.close()
        await self.leases.close()
        await self.transport.close()


class Replicas:
    """Spreads sessions over the servers by their load. Servers may be added and retired.

    Without any server, sessions wait for the next one, up to `wait` seconds after the last one was retired.
    """

    def __init__(self, replicas: Sequence[Replica], wait: float = 0.0) -> None:
        self._replicas = list(replicas)
        self.expected: EnvDescription | None = None
        """The first server's description, with which the others must agree."""
        self._wait = wait
        self._empty_since = asyncio.get_running_loop().time()
        self._server_added = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._growing: dict[Replica, asyncio.TimerHandle] = {}
        for replica in replicas:
            replica.on_capacity = self._wake

    async def connect(self, seconds: float) -> None:
        """Ask all servers concurrently for their description. A server that does not answer is skipped for a while.

        Raises `EnvgymError` where none answers, and where they serve different tasks.
        """
        failures: dict[Replica, RemoteError] = {}
        describing = [replica.describe(seconds) for replica in self._replicas]
        answers = await asyncio.gather(*describing, return_exceptions=True)
        for replica, answer in zip(self._replicas, answers, strict=True):
            if isinstance(answer, RemoteError) and answer.retryable:
                failures[replica] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self.expected = self.expected or answer
                check_same(self.expected, answer, replica.address)
        if self.expected is None:
            raise next(iter(failures.values()))
        for replica in failures:
            replica.mark_down()

    def add(self, replica: Replica) -> None:
        """Add a server that has been described. Raises `RemoteError` where it has other tasks."""
        assert replica.description is not None
        self.expected = self.expected or replica.description
        check_same(self.expected, replica.description, replica.address)
        replica.on_capacity = self._wake
        self._replicas.append(replica)
        self._server_added.set()
        self._close_retired()
        self._wake()

    def retire(self, replica: Replica) -> None:
        """Give a server no new sessions."""
        replica.is_retired = True
        if not self.has_servers:
            self._empty_since = asyncio.get_running_loop().time()
        self._close_retired()
        self._wake()

    def _close_retired(self) -> None:
        for replica in [replica for replica in self._replicas if replica.is_retired]:
            if replica.in_use == 0 and not replica.transport.is_busy:
                self._replicas.remove(replica)
                start_task(replica.close(), self._closing)

    @property
    def servers(self) -> tuple[Replica, ...]:
        """All servers, including retired ones with open sessions."""
        return tuple(self._replicas)

    @property
    def has_servers(self) -> bool:
        """Tell whether there is a server that is not retired."""
        return bool(self._active)

    async def wait_for_server(self) -> None:
        """Wait for a server. Raises `RemoteError` if there has been none for `wait` seconds."""
        while not self.has_servers:
            self._server_added.clear()
            try:
                async with asyncio.timeout_at(self._empty_since + self._wait):
                    await self._server_added.wait()
            except TimeoutError:
                if not self.has_servers:
                    message = f"no server has been registered for {self._wait:g} s"
                    raise RemoteError("no_server", message) from None

    @property
    def capacity(self) -> int | None:
        """The sum of the stated capacities (None: none is known)."""
        capacities = [replica.stated_capacity for replica in self._active if replica.stated_capacity is not None]
        return sum(capacities) if capacities else None

    @property
    def down_replicas(self) -> list[Replica]:
        """Servers that are down."""
        return [replica for replica in self._active if replica.is_down]

    def has_other(self, replica: Replica, failed: Collection[Replica] = ()) -> bool:
        """Tell whether another server is up and has not `failed`."""
        return any(not server.is_down and server not in (replica, *failed) for server in self._active)

    @property
    def lost_at(self) -> float:
        """The loop's time at which the last server was lost; 0: none has been."""
        return max((server.transport.lost_at for server in self._active), default=0.0)

    def has_untried(self, failed: Collection[Replica]) -> bool:
        """Tell whether a server, up or down, has not `failed`."""
        return any(replica not in failed for replica in self._active)

    def pick_any(self, failed: Collection[Replica] = ()) -> Replica:
        """A server for requests without a session (tasks, scores), if possible one that has not `failed`."""

        def rank(server: Replica) -> tuple[bool, bool, float, int]:
            return server in failed, server.is_down, server.is_down and server.try_at, server.in_use

        return min(self._active, key=rank)

    async def acquire_slot(self) -> Replica:
        """Wait for a free slot, and take it on the server with the lowest load.

        If every server is down, returns one of them: the next request shows whether it works again. Raises
        `RemoteError` as `wait_for_server` does.
        """
        while True:
            await self.wait_for_server()
            if (replica := self._pick_free()) is not None:
                break
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()  # the slot goes to another
                raise
        replica.in_use += 1
        return replica

    def release_slot(self, replica: Replica) -> None:
        """Give a slot back."""
        replica.in_use -= 1
        self._close_retired()
        self._next()

    def mark_full(self, replica: Replica, error: ServerFull) -> None:
        """Give the slot back on a server that other clients have filled: limit its capacity to the slots in use, and
        raise it again step by step."""
        replica.in_use -= 1
        replica.capacity = replica.in_use
        if replica not in self._growing:
            self._grow_after(error.retry_after, replica)

    def _grow_after(self, seconds: float, replica: Replica) -> None:
        """After `seconds`, raise a full server's capacity by a step, and again until it is the stated one."""

        def grow() -> None:
            del self._growing[replica]
            capacity, limit = replica.capacity, replica.stated_capacity
            if capacity is None or limit is None or capacity >= limit:
                return
            replica.capacity = min(limit, capacity + max(1, capacity // 4))
            for _ in range(replica.capacity - capacity):
                self._next()
            self._grow_after(seconds, replica)

        self._growing[replica] = asyncio.get_running_loop().call_later(seconds, grow)

    @property
    def _active(self) -> Sequence[Replica]:
        """Servers that are not retired, whether up or down."""
        return [replica for replica in self._replicas if not replica.is_retired]

    def _pick_free(self) -> Replica | None:
        """The server with a free slot and the lowest load, or None. One that is down is taken only after its pause, or
        if all are."""
        time = asyncio.get_running_loop().time()
        usable = [server for server in self._active if not server.is_down or server.try_at <= time]
        candidates = [server for server in usable or self._active if server.has_free_slot]
        if not candidates:
            return None
        best = min(candidates, key=lambda server: server.load)
        if best.is_down:  # one session tries it; the others use another server meanwhile
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


def check_same(expected: EnvDescription, description: EnvDescription, address: Address) -> None:
    """Raise `RemoteError` where the tasks of a split differ from the `expected` ones; warn of other code."""
    problem = ""
    expected_sizes, sizes = ({name: s.size for name, s in env.splits.items()} for env in (expected, description))
    if expected_sizes != sizes:
        problem = f"{sizes}, not {expected_sizes}"
    elif any(s.tasks and description.splits[name].tasks not in ("", s.tasks) for name, s in expected.splits.items()):
        problem = "as many, but not the same"
    if problem:
        message = f"serves other tasks than it did, or than the other servers do ({problem})"
        raise RemoteError("refused", f"{address} {message}")
    if expected.fingerprint.get("code") != description.fingerprint.get("code"):
        logger.warning("%s runs other code of the environment than before, or than the other servers", address)
