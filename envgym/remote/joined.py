"""An environment on servers that join: `--env joined://HOST:PORT/NAME` listens, and plays on whoever is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from envgym.errors import ConfigError, EnvgymError

from .access import Address, url_parts
from .client import ConnectionConfig, ServedEnvSpec
from .frames import Answer, Method
from .gate import Gate, Member
from .replicas import CONNECT_SECONDS, Replica, Replicas, check_same
from .transport import Counters, RemoteError, Transport
from .wire import MAX_BODY, EnvDescription

SCHEME = "joined://"
RESUME_SECONDS = 1.0
"""How long a request waits for a dropped connection to be made again, before it counts as failed."""

logger = logging.getLogger(__name__)
B = TypeVar("B", bound=BaseModel)


class JoinedConfig(ConnectionConfig):
    """Also how servers may join."""

    token_file: Path | None = None
    """Who may join: lines NAME TOKEN, or one token. Only its path is saved."""
    tls_cert: Path | None = None
    """Certificate, with its chain, of this machine, as PEM."""
    tls_key: Path | None = None
    """Its key, as PEM."""
    wait: float = Field(default=600.0, gt=0)
    """Seconds to wait for a server while none is there: for the first one, and whenever the last one has gone."""


class JoinedEnvSpec(ServedEnvSpec):
    """The environment `joined://HOST:PORT/NAME`: NAME on the servers that join at HOST:PORT of this machine. Without
    NAME, the only one that each of them serves."""

    Config = JoinedConfig
    config: JoinedConfig

    def __init__(self, id: str, **kwargs: Any) -> None:
        super().__init__(id.rstrip("/"), **kwargs)
        self._host, self._port, self._name = _parse(self.id)

    @property
    def replicas(self) -> Replicas:
        found = self._replicas.get(asyncio.get_running_loop())
        if found is None:
            raise EnvgymError(f"{self.id}: nothing listens yet; write `async with spec:` around what uses it")
        return found

    async def setup(self) -> None:
        """Listen, and wait for the first server. Raises `EnvgymError` where none comes within `config.wait`."""
        replicas = JoinedReplicas(self._name, self.config.wait, self.id, self.counters)
        self._replicas[asyncio.get_running_loop()] = replicas
        config = self.config
        try:
            await replicas.listen(self._host, self._port, config.token_file, config.tls_cert, config.tls_key)
            if not replicas.anyone:
                scheme, more = ("http", "") if config.tls_cert is None else ("https", " --ca-file CERTIFICATE")
                more = more if config.token_file is None else f" --token-file F{more}"
                logger.warning(
                    "%s: waiting for a server; start one: envgym serve E --join %s://THIS_MACHINE:%d%s",
                    self.id, scheme, self._port, more,
                )  # fmt: skip
            await replicas.ready()
            self._description = replicas.description
        except BaseException:
            await self.teardown()
            raise

    async def ask_any(self, model: type[B], method: Method, path: str, body: BaseModel | None = None) -> B:
        """As on servers that stay, but another one is waited for where the last one goes."""
        replicas = self.replicas
        assert isinstance(replicas, JoinedReplicas)
        while True:
            await replicas.ready()
            try:
                return await super().ask_any(model, method, path, body)
            except RemoteError as error:
                if error.kind != "connection" or replicas.anyone:
                    raise


class JoinedTransport(Transport):
    """Calls over the connection that a server made to us."""

    def __init__(self, member: Member, counters: Counters) -> None:
        super().__init__(member.label, counters)
        self._member = member

    async def _send(self, method: Method, path: str, body: bytes | None) -> Answer:
        if body is not None and len(body) > MAX_BODY:
            raise RemoteError("refused", f"{self.url}: a body has at most {MAX_BODY} bytes", retryable=False)
        while await self._member.connected(RESUME_SECONDS):
            try:
                return await self._member.send(method, path, body or b"")
            except ConnectionError:
                self.counters.requests += 1
                self.counters.retries += 1
        what = "its connection dropped and it has not joined again"
        raise RemoteError("connection", f"{self.url}: {what}", retryable=True)


class JoinedReplica(Replica):
    """A server that joined. While it is not connected, or takes no new sessions, it is down: that is known, and not
    tried out."""

    def __init__(self, member: Member, name: str, counters: Counters) -> None:
        super().__init__(Address(member.label, name), JoinedTransport(member, counters), member.hello.weight)
        self.member = member

    async def _describe(self, patience: float) -> EnvDescription:
        found = await super()._describe(patience)
        quota = self.member.client.max_sessions
        if quota is not None and self.room is not None:
            self.room = self.stated_room = min(self.room, quota)
        return found

    def is_up(self) -> None:
        if self.member.is_open:
            super().is_up()

    def is_down(self) -> None:
        if self.member.hello.leaving and not self.down:
            logger.warning("%s takes no new sessions", self.address)
            self.down = True  # nor is it said that it cannot be reached
        super().is_down()

    def _fell_silent(self, seconds: float) -> None:
        self.member.drop()
        super()._fell_silent(seconds)


class JoinedReplicas(Replicas):
    """The servers that are there, for one environment. Those that serve another one, or other tasks, are left out."""

    def __init__(self, name: str, wait: float, what: str, counters: Counters) -> None:
        super().__init__(())
        self.description: EnvDescription | None = None
        """That of the first server."""
        self._name = name
        self._wait = wait
        self._what = what
        self._counters = counters
        self._gate: Gate | None = None
        self._by_member: dict[Member, JoinedReplica] = {}
        self._looking: dict[Member, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._alone_since: float | None = asyncio.get_running_loop().time()
        """Since when no server is there; None while one is."""

    async def listen(
        self, host: str, port: int, token_file: Path | None, tls_cert: Path | None, tls_key: Path | None
    ) -> None:
        self._gate = await Gate.open(host, port, token_file, tls_cert, tls_key, self._on_change)

    @property
    def anyone(self) -> bool:
        """Whether a server is there."""
        return bool(self._there)

    @property
    def _there(self) -> Sequence[JoinedReplica]:
        return [replica for replica in self._by_member.values() if replica.member.is_open]

    @property
    def room(self) -> int | None:
        rooms = [replica.stated_room for replica in self._there]
        known = [room for room in rooms if room is not None]
        return sum(known) if known else None

    async def ready(self) -> None:
        """Wait until a server is there. Raises `RemoteError` where none has been for `wait` seconds."""
        while not self.anyone:
            self._changed.clear()
            assert self._alone_since is not None
            try:
                async with asyncio.timeout_at(self._alone_since + self._wait):
                    await self._changed.wait()
            except TimeoutError:
                if not self.anyone:
                    raise RemoteError(
                        "no_server", f"{self._what}: no server has been there for {self._wait:g} s", retryable=True
                    ) from None

    async def take(self) -> Replica:
        while True:
            await self.ready()
            try:
                async with asyncio.timeout(self._wait):
                    return await super().take()
            except TimeoutError:  # all are full; or gone, which `ready` looks into
                continue

    def _on_change(self, member: Member) -> None:
        replica = self._by_member.get(member)
        if member.is_gone:
            self._forget(member)
        elif replica is None:
            if member.is_open and member not in self._looking:
                looking = self._looking[member] = asyncio.create_task(self._look(member))
                looking.add_done_callback(lambda _: self._looking.pop(member))
        elif member.is_open:
            if replica.down:
                logger.warning("%s: %s joined again", self._what, member.label)
            replica.is_up()
            self._came()
        else:
            self._went(replica)

    async def _look(self, member: Member) -> None:
        """Take a server in that serves what is wanted."""
        replica = JoinedReplica(member, self._name, self._counters)
        try:
            found = await replica.describe(CONNECT_SECONDS)
            if self.description is not None:
                check_same(self.description, found, replica.address)
        except EnvgymError as error:
            logger.warning("%s joined and is left out: %s", member.label, error)
            await member.notify(f"this server is left out of {self._what}: {error}")
            await replica.close()
            return
        except BaseException:
            await replica.close()
            raise
        if self.description is None:
            self.description = found
        self._by_member[member] = replica
        self._replicas.append(replica)
        logger.warning("%s: %s joined, with room for %s sessions", self._what, member.label, replica.room)
        if member.is_open:
            self._came()
        else:
            self._went(replica)

    def _came(self) -> None:
        self._alone_since = None
        self._changed.set()
        self._wake()

    def _went(self, replica: JoinedReplica) -> None:
        replica.is_down()
        if not self.anyone and self._alone_since is None:
            self._alone_since = asyncio.get_running_loop().time()

    def _forget(self, member: Member) -> None:
        replica = self._by_member.pop(member, None)
        if replica is not None:
            self._replicas.remove(replica)
            self._looking[member] = asyncio.create_task(replica.close())
            self._looking[member].add_done_callback(lambda _: self._looking.pop(member))

    async def close(self) -> None:
        if self._gate is not None:
            await self._gate.leave(self._on_change)
        for task in list(self._looking.values()):
            task.cancel()
        if self._looking:
            await asyncio.wait(list(self._looking.values()))
        await super().close()


def _parse(id: str) -> tuple[str, int, str]:
    form = f"it looks like {SCHEME}HOST:PORT/NAME, HOST and PORT being where this machine listens"
    parts = url_parts(id, ("joined",), form)
    name = parts.path.strip("/")
    if not parts.hostname or not parts.port or "/" in name:
        raise ConfigError(f"{id}: not a usable URL; {form}")
    return parts.hostname, parts.port, name
