"""The channel: requests and answers over one WebSocket, many concurrently, and each answered when it is done.

A binary message holds some of them: a line of JSON that lists their heads, and behind it their bodies, one after the
other. Requests are those of `routes`, and may be sent again over another connection, or over HTTP.

A body of more than `CHANNEL_BODY` bytes goes over HTTP, since it would hold up all others: a request with one is sent
there immediately, and one with such an answer is answered with 413 and sent again there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Generic, TypeVar

import aiohttp
from aiohttp import web
from pydantic import Field, TypeAdapter

from envgym.processes.cancellation import start_task

from .wire import Answer, Method

CHANNEL_PATH = "/v1/channel"
CHANNEL_BODY, FULL_COUNT = 2**18, 16
"""Bytes and number of requests at which a message is full: while one end reads it, the other fills the next."""
MAX_MESSAGE = 4 * CHANNEL_BODY
"""Bytes of the largest message: one that is full but for a byte, a further body, and their heads; with room to
spare."""
PING_SECONDS = 30.0
"""Interval of the server's and the client's pings. A server that stands still is noticed sooner, by its sessions'
leases."""
MAX_REQUESTS = 2**15
"""Concurrent requests of one connection: far more than the sessions of one client."""
MAX_UNSENT = 2**26
"""Bytes of unsent answers of one connection, from which on its requests wait unread."""
CLOSE_SECONDS = 2.0
"""Seconds the other end may take to answer the end of a connection, and to read unsent messages."""

Length = Annotated[int, Field(ge=0)]
RequestHead = tuple[int, Method, str, Length]
"""A request's number (unique within the connection), its method, its path with the query, and its body's length."""
AnswerHead = tuple[int, int, str, Length]
"""The request's number, the answer's status and content type, and the body's length."""
_REQUESTS: TypeAdapter[list[RequestHead]] = TypeAdapter(list[RequestHead])
_ANSWERS: TypeAdapter[list[AnswerHead]] = TypeAdapter(list[AnswerHead])

H = TypeVar("H", RequestHead, AnswerHead)
Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
CarryOut = Callable[[str, str, bytes], Awaitable[Answer]]
"""Answers a request: its method, its path with the query, and its body. Every error is an answer."""


async def close_socket(
    socket: Socket, code: int = aiohttp.WSCloseCode.OK, transport: asyncio.Transport | None = None
) -> None:
    """Close a connection within `CLOSE_SECONDS`, and abort its `transport`: both would wait forever for a peer that no
    longer reads."""
    if transport is not None:
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, transport.abort)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await socket.close(code=code)


def server_socket() -> web.WebSocketResponse:
    """The server's end of a channel, to be prepared."""
    return web.WebSocketResponse(
        timeout=CLOSE_SECONDS,
        heartbeat=PING_SECONDS,
        max_msg_size=MAX_MESSAGE,
        compress=False,  # decompression would let a small message fill the memory
    )


def _pack(adapter: TypeAdapter[list[H]], items: Sequence[tuple[H, bytes]]) -> bytes:
    return b"".join([adapter.dump_json([head for head, _ in items]), b"\n", *(body for _, body in items)])


def _unpack(adapter: TypeAdapter[list[H]], message: bytes) -> Iterator[tuple[H, bytes]]:
    """The heads and the bodies of a message. Raises `ValueError` for a malformed one, before it yields anything."""
    line, newline, _ = message.partition(b"\n")
    heads = adapter.validate_json(line, strict=True)
    ends = list(itertools.accumulate((head[3] for head in heads), initial=len(line) + len(newline)))
    if ends[-1] != len(message):
        raise ValueError("the bodies are not as long as their heads say")
    return ((head, message[start:stop]) for head, start, stop in zip(heads, ends, ends[1:], strict=False))


class _Outbox(Generic[H]):
    """Sends items together: those of one turn of the event loop, or of the time in which a message is being written."""

    def __init__(self, socket: Socket, adapter: TypeAdapter[list[H]], on_broken: Callable[[], None]) -> None:
        self._socket = socket
        self._adapter: TypeAdapter[list[H]] = adapter
        self._on_broken = on_broken
        self.items: list[tuple[H, bytes]] = []
        self.size = 0
        """Bytes of the waiting bodies."""
        self.writing: asyncio.Task[None] | None = None

    def put(self, head: H, body: bytes) -> None:
        self.size += len(body)
        self.items.append((head, body))
        if self.writing is None:
            self.writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Send the waiting items until there are none. If the connection breaks, they are dropped and `on_broken` is
        called."""
        try:
            while self.items:
                await self._socket.send_bytes(_pack(self._adapter, self._next()))
        except (aiohttp.ClientError, ConnectionError):
            self.items.clear()
            self.size = 0
            self._on_broken()
        finally:
            self.writing = None

    def _next(self) -> list[tuple[H, bytes]]:
        """Remove and return the items of the next message."""
        items, size, number = self.items, 0, 0
        for number, (_, body) in enumerate(items, 1):
            size += len(body)
            if number == FULL_COUNT or size >= CHANNEL_BODY:
                break
        self.size -= size
        self.items = items[number:]
        return items[:number]


class ChannelClient:
    """The client's end. `is_open` until the connection ends, however it does."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.is_open = True
        self._socket = socket
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outbox = _Outbox(socket, _REQUESTS, self._end)

    async def ask(self, method: Method, target: str, body: bytes) -> Answer:
        """The answer to a request. Raises `ConnectionError` where the connection ends before it."""
        if not self.is_open:
            raise ConnectionError("the connection dropped")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._outbox.put((number, method, target, len(body)), body)
        try:
            return await answer
        finally:
            del self._waiting[number]

    async def listen(self) -> bool:
        """Deliver answers until the connection ends. Returns True if there was any; raises `ValueError` for a malformed
        message."""
        received = False
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.TEXT or isinstance(message.data, aiohttp.WebSocketError):
                    raise ValueError("not a message of a channel")
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break  # no answer to a ping
                for (number, status, content_type, _), content in _unpack(_ANSWERS, message.data):
                    waiting = self._waiting.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(Answer(status, content_type, content))
                received = True
                await asyncio.sleep(0)  # callers with answers send their next requests, and the server works meanwhile
        finally:
            self._end()
            await close_socket(self._socket)
        return received

    def _end(self) -> None:
        self.is_open = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the connection dropped"))


class ChannelServer:
    """The server's end, with a separate task per request: it continues when the connection ends, and a repeated request
    over another connection waits for it.

    At `MAX_REQUESTS` requests without a sent answer, or `MAX_UNSENT` bytes of answers, further requests wait unread.
    """

    def __init__(self, socket: web.WebSocketResponse, carry_out: CarryOut) -> None:
        self._socket = socket
        self._carry_out = carry_out
        self._working: set[asyncio.Task[None]] = set()
        self._outbox = _Outbox(socket, _ANSWERS, lambda: None)

    async def run(self) -> None:
        """Answer until the connection ends. Raises `ValueError` for a message that is no request."""
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            for head, body in _unpack(_REQUESTS, message.data):
                start_task(self._answer(head, body), self._working)
            await asyncio.sleep(0)  # start the tasks and send finished answers: the other end works at the same time
            while self._is_full and not self._socket.closed:  # closing does not end the wait: hence its timeout
                await asyncio.wait(self._busy, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self) -> None:
        """Wait until every request is answered and every answer sent."""
        while self._busy and not self._socket.closed:
            await asyncio.wait(self._busy)

    @property
    def _is_full(self) -> bool:
        return len(self._working) + len(self._outbox.items) > MAX_REQUESTS or self._outbox.size > MAX_UNSENT

    @property
    def _busy(self) -> list[asyncio.Task[None]]:
        return [*self._working, *([] if self._outbox.writing is None else [self._outbox.writing])]

    async def _answer(self, head: RequestHead, body: bytes) -> None:
        number, method, target, _ = head
        answer = await self._carry_out(method, target, body)
        if len(answer.content) > CHANNEL_BODY:
            answer = Answer(413, "", b"")
        if not self._socket.closed:
            self._outbox.put((number, answer.status, answer.content_type, len(answer.content)), answer.content)
