"""Servers that register: `envgym serve E --register URL` announces a server to a trainer, which then dials it.

A registration is a request to the address where the trainer listens (`env.listen`), and a lease: the server repeats it,
so that a restarted trainer soon has the server again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import re
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import web

from envgym.errors import ConfigError, EnvgymError, reported_as
from envgym.net.listening import is_loopback, listen, tls_context
from envgym.net.problems import Problem
from envgym.net.server import SERVER, Connections, authenticate, parse, read_json, serve_requests
from envgym.net.shared_calls import SharedCalls
from envgym.net.tokens import ServerClient, Tokens

from .access import Access, Address, access, parse_address
from .encoding import encode
from .replicas import Replica, Replicas
from .transport import Counters, RemoteError, Transport
from .wire import VERSION, Registered, ServerRegistration

PATH = "/v1/servers"
LEASE_SECONDS = 20.0
"""Seconds without a registration after which a server gets no new sessions."""
RENEWALS = 4
"""Registrations that a server sends within a lease."""
ANSWER_SECONDS = 60.0
"""Time limit for a trainer to answer a registration: it first asks the server for its environments."""
MAX_REGISTRATION, BODY_SECONDS = 2**14, 10.0
"""Bytes of the largest registration, and how long it may take to arrive."""

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------
# The trainer's side


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """The settings of a listener: an address HOST:PORT, the hosts that are dialled, tokens and TLS."""

    address: str
    allow: tuple[str, ...]
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None

    @property
    def url(self) -> str:
        return f"{'http' if self.tls_cert is None else 'https'}://{self.address}"

    def allows(self, host: str, port: int) -> bool:
        """Tell whether `allow` contains `host`, with `port` or without a port (see `split_port`)."""
        entries = [split_port(entry) for entry in self.allow]
        hosts = [entry.lower() for entry, entry_port in entries if entry_port in (None, port)]
        if host.lower() in hosts:
            return True
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            networks = [ipaddress.ip_network(entry) for entry in hosts if "/" in entry]
            return any(address in network for network in networks)
        return False


def split_port(entry: str) -> tuple[str, int | None]:
    """The host of an entry in the setting `allow` (a name, an address, or a network such as `10.0.0.0/8`), and its port
    (None: any). An IPv6 address with a port is in brackets. Raises `ValueError` for a malformed entry."""
    match = re.fullmatch(r"(?:\[(.+)\]|([^:]+|[^/]+/\d+))(?::(\d{1,5}))?|([^/]+)", entry)
    host = "" if match is None else match[1] or match[2] or match[4]
    if "/" in host:
        ipaddress.ip_network(host)
    elif not re.fullmatch(r"[0-9A-Za-z._-]+|[0-9a-fA-F:.]+", host):
        raise ValueError(f"an entry is HOST or HOST:PORT, where HOST is a name, an address or a network: not {entry!r}")
    return host, int(match[3]) if match is not None and match[3] else None


_Key = tuple[str, str]
"""The token's name and the URL of a server."""


@dataclass(slots=True)
class _RegisteredServer:
    """A registered server. `instance` identifies the server's process; `timer` removes the server when its lease
    ends."""

    replica: Replica
    instance: str
    timer: asyncio.TimerHandle


class RegisteredServers:
    """The registrations of one environment. A server is asked for its description and added to the `replicas`, and
    removed when it leaves or its lease expires."""

    def __init__(self, replicas: Replicas, name: str, access: Access, counters: Counters, label: str) -> None:
        self._replicas = replicas
        self._name = name
        self._access = access
        self._is_guarded = bool(access.headers) or access.tls is not True
        self._counters = counters
        self._label = label
        self._static_servers = {replica.address.server for replica in replicas.servers}
        self._members: dict[_Key, _RegisteredServer] = {}
        self._dialling: SharedCalls[_Key, None] = SharedCalls()
        self._problems: dict[_Key, str] = {}

    async def register(self, registration: ServerRegistration, client: ServerClient) -> str:
        """Add a server, renew its lease, or remove it. Returns the reason why it is not used; empty if it is."""
        if registration.url in self._static_servers:
            return ""  # it is used without a registration
        key = client.name, registration.url  # the token's name, so that no server can replace another's
        if registration.leaving:
            self._remove(key, "takes no new sessions")
            return ""
        member = self._members.get(key)
        if member is None or member.instance != registration.instance:
            try:
                await self._dialling.result(key, lambda: self._add(key, registration, client))
            except EnvgymError as error:
                if self._problems.get(key) != str(error):
                    logger.warning("%s: %s registered and is not used: %s", self._label, registration.url, error)
                self._problems[key] = str(error)
                return f"{self._label}: {error}"
            self._problems.pop(key, None)
        member = self._members.get(key)
        if member is not None:  # None: it has left meanwhile
            member.timer.cancel()
            member.timer = self._start_lease(key)
        return ""

    def _start_lease(self, key: _Key) -> asyncio.TimerHandle:
        reason = f"has not registered for {LEASE_SECONDS:g} s"
        return asyncio.get_running_loop().call_later(LEASE_SECONDS, self._remove, key, reason)

    async def _add(self, key: _Key, registration: ServerRegistration, client: ServerClient) -> None:
        """Connect to a registered server and use it, in place of its earlier instance. Raises `EnvgymError` if it
        cannot be used."""
        self._remove(key, "was restarted")
        parts = urlsplit(registration.url)
        if self._is_guarded and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                "with env.token_file or env.ca_file a server elsewhere is dialled by https alone, so that nobody "
                "reads the token in transit: serve with --tls-cert and --tls-key, and --advertise an https address"
            )
        transport = Transport(registration.url, self._access, self._counters)
        address = Address(registration.url, self._name)
        replica = Replica(address, transport, registration.weight, client.max_sessions)
        try:
            await replica.describe()
            self._replicas.add(replica)
        except BaseException:
            await replica.close()
            raise
        self._members[key] = _RegisteredServer(replica, registration.instance, self._start_lease(key))
        logger.warning("%s: %s is used, for up to %s sessions", self._label, registration.url, replica.capacity)

    def _remove(self, key: _Key, why: str) -> None:
        member = self._members.pop(key, None)
        if member is not None:
            logger.warning("%s: %s %s", self._label, key[1], why)
            member.timer.cancel()
            self._replicas.retire(member.replica)

    async def close(self) -> None:
        for member in self._members.values():
            member.timer.cancel()
        await self._dialling.close()


class Listener:
    """One address where servers register, shared by all environments of an event loop with that address."""

    _locks: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]] = WeakKeyDictionary()
    """Held while a listener opens or closes, so that an address has one listener at a time."""
    _open: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Listener]]] = WeakKeyDictionary()

    def __init__(self, settings: ListenerSettings) -> None:
        self._settings = settings
        self._tokens = None if settings.token_file is None else Tokens.read(settings.token_file)
        self._environments: list[RegisteredServers] = []
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def subscription(cls, servers: RegisteredServers, settings: ListenerSettings) -> AsyncIterator[None]:
        """Pass registrations on to `servers`.

        Raises `ConfigError` for an address that is taken, unknown, or public without tokens, and for files that
        cannot be used.
        """
        loop = asyncio.get_running_loop()
        lock = cls._locks.setdefault(loop, asyncio.Lock())
        listeners = cls._open.setdefault(loop, {})
        async with lock:
            listener = listeners.get(settings.address)
            if listener is None:
                listener = cls(settings)
                await listener._listen()
                listeners[settings.address] = listener
            if listener._settings != settings:
                raise ConfigError(f"env.listen={settings.address} has other hosts, tokens or certificates elsewhere")
            listener._environments.append(servers)
        try:
            yield
        finally:
            async with lock:
                listener._environments.remove(servers)
                if not listener._environments:
                    del listeners[settings.address]
                    await listener._stack.aclose()

    async def _listen(self) -> None:
        """Open the socket and answer registrations. Raises `ConfigError`."""
        settings = self._settings
        host, _, port = settings.address.rpartition(":")
        refusal = "without env.listen_token_file: whoever can reach it could pose as an environment"
        tls = tls_context(settings.tls_cert, settings.tls_key)
        listener = listen(host.strip("[]"), int(port), refusal=None if self._tokens else refusal)
        if tls is None and not is_loopback(str(listener.getsockname()[0])):
            logger.warning("servers register at %s without TLS: tokens can be read on the way", settings.address)
        await self._stack.enter_async_context(serve_requests(Connections(self._answer), listener, tls=tls, drain=1.0))

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Register a server with all environments; the answer has the reasons of those that do not use it."""
        client = authenticate(request, self._tokens)
        if request.method != "POST" or not request.path.endswith(PATH):
            raise Problem(404, "not-found", f"servers register here: envgym serve E --register URL (POST {PATH})")
        body = await read_json(request, MAX_REGISTRATION, BODY_SECONDS)
        registration = self._check(parse(ServerRegistration, body))
        calls = [servers.register(registration, client) for servers in self._environments]
        problems = tuple(problem for problem in await asyncio.gather(*calls) if problem)
        answer = encode(Registered(lease_seconds=LEASE_SECONDS, problems=problems))
        return web.Response(body=answer, content_type="application/json", headers={"Server": SERVER})

    def _check(self, registration: ServerRegistration) -> ServerRegistration:
        """The registration, its URL without a path. Raises a `Problem` for another version, an unusable URL, or a host
        that is not allowed."""
        if registration.version != VERSION:
            detail = f"the server speaks version {registration.version} of the protocol, the trainer version {VERSION}"
            raise Problem(409, "invalid-request", f"{detail}: install the same envgym on both sides")
        try:
            address = parse_address(registration.url)
        except ConfigError as error:
            raise Problem(422, "invalid-request", str(error)) from None
        parts = urlsplit(address.server)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if address.name or not self._settings.allows(host, port):
            detail = f"this trainer dials the hosts in env.allow, and {host} is not one of them on port {port}"
            raise Problem(403, "forbidden", f"{detail}; --advertise gives another address of the server")
        return registration.model_copy(update={"url": address.server})


# ---------------------------------------------------------------------------------------------------------
# The server's side


@dataclass(frozen=True, slots=True)
class Announcement:
    """The settings of a server that registers: the trainer's URL, a token and certificates for it, the URL by which the
    trainer is to dial the server (None: that of its socket), and its weight. Raises `ConfigError` for an address or a
    weight that cannot be used."""

    trainer: str
    token_file: Path | None = None
    ca_file: Path | None = None
    advertise: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for option, url in (("--register", self.trainer), ("--advertise", self.advertise)):
            with reported_as(ConfigError, option, cause=ConfigError):
                env_name = "" if url is None else parse_address(url).name
            if env_name and option == "--advertise":
                raise ConfigError(f"--advertise is the server's address, without an environment's name: not {url}")
        if not 0 < self.weight <= 1e6:
            raise ConfigError(f"--weight is above 0, and at most 1e6, not {self.weight:g}")


class Announcer:
    """Registers the server at `url`, its address and port, until it leaves."""

    def __init__(self, announcement: Announcement, url: str, on_registered: Callable[[str], None]) -> None:
        self._trainer = announcement.trainer.rstrip("/")
        advertised = (announcement.advertise or _reachable_url(url, self._trainer)).rstrip("/")
        trainer_access = access([self._trainer], announcement.token_file, announcement.ca_file)
        self._transport = Transport(self._trainer, trainer_access, Counters())
        self._registration = ServerRegistration(instance=uuid.uuid4().hex, url=advertised, weight=announcement.weight)
        self._on_registered = on_registered

    async def run(self) -> None:
        """Register, and renew the lease forever. Raises `ConfigError` where the trainer rejects the first registration;
        later, it is retried after a rejection or a failed connection."""
        is_registered, last, seconds = False, "", LEASE_SECONDS / RENEWALS
        while True:
            problem = ""
            try:
                answer = await self._send(ANSWER_SECONDS)
                seconds = answer.lease_seconds / RENEWALS
                if answer.problems:
                    problem = f"{self._trainer} does not use this server: {answer.problems[0]}"
                elif not is_registered:
                    is_registered, last = True, ""
                    self._on_registered(self._registration.url)
            except RemoteError as error:
                if error.kind == "refused" and not is_registered:
                    raise ConfigError(f"--register: {error}") from None
                problem = f"{error}; the server keeps running, and retries"
            if problem != last:
                logger.warning("%s", problem or f"registered at {self._trainer} again")
            last = problem
            await asyncio.sleep(seconds * random.uniform(0.75, 1.0))  # spreads those of many servers

    async def leave(self) -> None:
        """Tell the trainer that no new sessions are taken, if it can be reached."""
        self._registration = self._registration.model_copy(update={"leaving": True})
        with contextlib.suppress(RemoteError):
            await self._send(BODY_SECONDS)

    async def close(self) -> None:
        await self._transport.close()

    async def _send(self, seconds: float) -> Registered:
        return await self._transport.ask(Registered, "POST", PATH, encode(self._registration), seconds=seconds)


def _reachable_url(url: str, trainer: str) -> str:
    """`url`, where a server that listens on all addresses has the one by which this machine reaches the trainer. Raises
    `ConfigError` for a server on a loopback address whose trainer is on another machine."""
    parts, target = urlsplit(url), urlsplit(trainer)
    host = parts.hostname or ""
    if is_loopback(host) and not is_loopback(target.hostname or ""):
        raise ConfigError(
            f"--register: a trainer on another machine cannot dial {url}; give --host 0.0.0.0, or --advertise URL"
        )
    if not ipaddress.ip_address(host).is_unspecified:
        return url
    try:
        family, kind, _, _, address = socket.getaddrinfo(target.hostname, target.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            host = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--register: no route to {trainer} ({error}); give --advertise URL") from None
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"
