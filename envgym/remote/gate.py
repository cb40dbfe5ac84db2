"""The trainer's address where servers join, and those that are there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from envgym.errors import ConfigError

from .admission import refuse_web_pages
from .connections import Connections, problem_response
from .frames import HELLO_SECONDS, JOIN_PATH, MAX_MESSAGE, PING_SECONDS, Answer, Hello, Method, Notice
from .links import CLOSE_SECONDS, Asking, end
from .listening import is_loopback, listen
from .server import tls_context
from .tokens import ANYONE, Client, Tokens
from .wire import MAX_BODY, VERSION, Problem

GONE_SECONDS = 120.0
"""A server that has not come back for so long is forgotten: its sessions' leases have run out."""

logger = logging.getLogger(__name__)
Tell = Callable[["Member"], None]


class Member:
    """A server that joined, by the process that it is: its connection may drop and be made again. `told` is called
    when it is there, is not, or takes no new sessions."""

    def __init__(self, client: Client, hello: Hello, told: Callable[[Member], None]) -> None:
        self._told = told
        self.client = client
        self.hello = hello
        self.label = f"{hello.name}-{hello.instance[:4]}"
        self.is_gone = False
        self._socket: web.WebSocketResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._asking: Asking | None = None
        self._there = asyncio.Event()
        self.closing: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    @property
    def is_open(self) -> bool:
        """Whether it takes new sessions."""
        return self._socket is not None and not self.hello.leaving

    async def connected(self, seconds: float) -> bool:
        """Wait for its connection. Returns whether it is there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._there.wait()
        return self._there.is_set()

    async def send(self, method: Method, target: str, body: bytes) -> Answer:
        """The answer to a request over the connection there is. Raises `ConnectionError` where it drops meanwhile."""
        asking = self._asking
        if asking is None:
            raise ConnectionError("it is not connected")
        try:
            return await asking.ask(method, target, body)
        except ConnectionError:
            if asking is self._asking:  # closing, which `listen` may not have heard of yet
                self.drop()
            raise

    async def notify(self, text: str) -> None:
        """Tell whoever runs the server, if it is there."""
        if self._socket is not None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await self._socket.send_str(Notice(text=text).model_dump_json())

    async def listen(self, link: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        """Hand on the answers that come over a connection, the newest this server has made, until it ends."""
        self.drop()  # an older one, of which only the server knows that it is dead
        self._socket, self._transport, self._asking = link, transport, Asking(link)
        asking = self._asking
        self._there.set()
        self._told(self)
        try:
            async for message in link:
                if message.type is aiohttp.WSMsgType.BINARY:
                    asking.hear(message.data)
                elif message.type is aiohttp.WSMsgType.TEXT:
                    said = Hello.model_validate_json(message.data, strict=True)
                    self.hello = self.hello.model_copy(update={"leaving": said.leaving})
                    self._told(self)
        except ValueError:
            logger.warning("%s sent what is no answer; its connection is closed", self.label)
        finally:
            if self._socket is link:
                self.drop()

    def drop(self) -> None:
        """End the connection: the server, if it is well, makes a new one, and requests are sent again over that."""
        link, self._socket = self._socket, None
        if link is None:
            return
        self._there.clear()
        if self._asking is not None:
            self._asking.end()
        closing = asyncio.create_task(end(link, aiohttp.WSCloseCode.GOING_AWAY, self._transport))
        self.closing.add(closing)
        closing.add_done_callback(self.closing.discard)
        self._told(self)


class Gate:
    """One listening address, for all environments of an event loop that name it."""

    _opening: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]] = WeakKeyDictionary()
    _open: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], Gate]]] = WeakKeyDictionary()

    def __init__(
        self,
        host: str,
        address: tuple[str, int],
        token_file: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
    ) -> None:
        self.members: dict[tuple[str, str], Member] = {}
        self.settings = (token_file, tls_cert, tls_key)
        self._host = host
        self._address = address
        self._tell: list[Tell] = []
        self._tokens = None if token_file is None else Tokens.read(token_file.expanduser())
        self._tls = None if tls_cert is None and tls_key is None else tls_context(tls_cert, tls_key)
        self._runner: web.ServerRunner | None = None
        self._links: dict[web.WebSocketResponse, asyncio.Transport] = {}
        self._forgetting: dict[Member, asyncio.TimerHandle] = {}

    @classmethod
    async def open(
        cls, host: str, port: int, token_file: Path | None, tls_cert: Path | None, tls_key: Path | None, tell: Tell
    ) -> Gate:
        """The gate at `host:port`; `tell` hears of every server whose state changes, and of those there are.

        Raises `ConfigError` for an address that is taken, unknown, or public without tokens, and for files that
        cannot be used.
        """
        address = _resolve(host), port
        async with cls._lock():
            gates = cls._gates()
            gate = gates.get(address)
            if gate is None:
                gate = cls(host, address, token_file, tls_cert, tls_key)
                await gate._listen()
                gates[address] = gate
            if gate.settings != (token_file, tls_cert, tls_key):
                raise ConfigError(f"joined://{host}:{port} is used with other tokens or certificates at the same time")
            gate._tell.append(tell)
        for member in gate.members.values():
            tell(member)
        return gate

    @classmethod
    def _lock(cls) -> asyncio.Lock:
        """Held by whoever opens or closes a gate: an address is free once the gate there has closed."""
        return cls._opening.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    @classmethod
    def _gates(cls) -> dict[tuple[str, int], Gate]:
        return cls._open.setdefault(asyncio.get_running_loop(), {})

    async def _listen(self) -> None:
        host = self._host
        listener = listen(host, self._address[1], refusal=None)
        bound = listener.getsockname()[0]
        if not is_loopback(bound):
            if self._tokens is None:
                listener.close()
                raise ConfigError(
                    f"refusing to let servers join at {host} without tokens: whoever can reach it could pose as an "
                    "environment; set env.token_file, or use 127.0.0.1"
                )
            if self._tls is None:
                logger.warning("servers join at %s without TLS: tokens and episodes can be read on the way", host)
        self._runner = web.ServerRunner(Connections(self._handle, MAX_BODY), shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=128, ssl_context=self._tls).start()

    async def leave(self, tell: Tell) -> None:
        """Tell no more. The last one to leave closes the gate; the servers dial again."""
        self._tell.remove(tell)
        async with self._lock():
            if not self._tell and self._gates().get(self._address) is self:  # nobody came while another closed
                try:
                    await self._close()
                finally:
                    del self._gates()[self._address]

    async def _close(self) -> None:
        for member in self.members.values():
            member.drop()
        for timer in self._forgetting.values():
            timer.cancel()
        closing = [end(link, aiohttp.WSCloseCode.GOING_AWAY, below) for link, below in self._links.items()]
        await asyncio.gather(*closing, *(task for member in self.members.values() for task in member.closing))
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            client = ANYONE
            if self._tokens is None:
                refuse_web_pages(request.headers.get("Host", ""), request.headers.get("Origin"))
            else:
                client = self._tokens.client(request.headers.get("Authorization"))
            link = web.WebSocketResponse(
                heartbeat=PING_SECONDS, timeout=CLOSE_SECONDS, max_msg_size=MAX_MESSAGE, compress=False
            )
            transport = request.transport
            if not request.rel_url.path.endswith(JOIN_PATH) or transport is None or not link.can_prepare(request):
                raise Problem(404, "not-found", f"environments join here: envgym serve E --join URL ({JOIN_PATH})")
        except Problem as problem:
            response = problem_response(problem)
            if not request.content.is_eof():
                response.force_close()
            return response
        await link.prepare(request)
        self._links[link] = transport
        try:
            await self._welcome(client, link, transport)
        finally:
            del self._links[link]
            await end(link, transport=transport)
        return link

    async def _welcome(self, client: Client, link: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = Hello.model_validate_json(await link.receive_str(), strict=True)
        except (TimeoutError, TypeError, ValidationError, aiohttp.ClientError):
            await link.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION, message=b"it did not say who it is")
            return
        if hello.version != VERSION:
            why = f"it speaks version {hello.version} of the protocol, the trainer version {VERSION}"
            await link.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION, message=why.encode())
            return
        await link.send_str(Hello(instance=hello.instance, name="trainer").model_dump_json())
        key = client.name, hello.instance
        member = self.members.get(key)
        if member is None:
            member = self.members[key] = Member(client, hello, self._changed)
        member.hello = hello
        await member.listen(link, transport)

    def _changed(self, member: Member) -> None:
        timer = self._forgetting.pop(member, None)
        if timer is not None:
            timer.cancel()
        if not member.is_connected:
            self._forgetting[member] = asyncio.get_running_loop().call_later(GONE_SECONDS, self._forget, member)
        for tell in list(self._tell):
            tell(member)

    def _forget(self, member: Member) -> None:
        del self._forgetting[member]
        del self.members[member.client.name, member.hello.instance]
        member.is_gone = True
        for tell in list(self._tell):
            tell(member)


def _resolve(host: str) -> str:
    """The address that a name stands for, so that two names of one share a gate; an unknown one as it is, for `listen`
    to refuse."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return host
    return str(found[0][4][0])
