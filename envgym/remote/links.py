"""The two ends of a WebSocket that carries requests (`frames`): the one that asks, and the one that answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic

import aiohttp
from aiohttp import web
from pydantic import TypeAdapter

from .connections import problem_answer
from .frames import (
    ANSWERS,
    ASKS,
    FULL_COUNT,
    FULL_MESSAGE,
    MAX_WHOLE,
    PING_SECONDS,
    Answer,
    AskHead,
    H,
    Method,
    Pieces,
    cut,
    is_piece,
    pack,
    unpack,
)
from .wire import MAX_BODY, Problem

MAX_REQUESTS = 2**15
"""Requests of one connection that are carried out at once: more than one client has sessions, by far."""

MAX_UNSENT = MAX_BODY
"""Bytes of the answers that wait to be sent on one connection before no more is read there."""

CLOSE_SECONDS = 2.0
"""How long the other end may take to hear the end of a connection, and to take what is still to be sent there."""

Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse
Carry = Callable[[str, str, bytes], Awaitable[Answer]]
"""Answers a request: its method, its path with the query, and its body. Every error is an answer."""


async def end(socket: Socket, code: int = aiohttp.WSCloseCode.OK, transport: asyncio.Transport | None = None) -> None:
    """Close a connection, also one whose other end reads nothing any more: it would wait for that for ever, and so
    would the `transport` below it, where that is known."""
    if transport is not None:
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, transport.abort)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await socket.close(code=code)


class _Outbox(Generic[H]):
    """Sends what is put into it in the same turn of the event loop, or while a message is being written, together; what
    is large in pieces, between those."""

    def __init__(self, socket: Socket, heads: TypeAdapter[list[H]], on_broken: Callable[[], None]) -> None:
        self._socket = socket
        self._heads: TypeAdapter[list[H]] = heads
        self._on_broken = on_broken
        self._items: list[tuple[H, bytes]] = []
        self._large: deque[tuple[H, bytes]] = deque()
        self.size = 0
        """Bytes that wait."""
        self._owes_pong = False
        self._writing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._items) + len(self._large)

    @property
    def writing(self) -> list[asyncio.Task[None]]:
        """The task that sends, while there is something to send."""
        return [] if self._writing is None else [self._writing]

    def put(self, head: H, body: bytes) -> None:
        self.size += len(body)
        (self._items if len(body) <= FULL_MESSAGE else self._large).append((head, body))
        self._wake()

    def pong(self) -> None:
        """Tell the other end that a piece arrived."""
        self._owes_pong = True
        self._wake()

    def _wake(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        pieces: Iterator[bytes] = iter(())
        try:
            while True:
                if self._items:
                    await self._socket.send_bytes(pack(self._heads, self._next()))
                if self._owes_pong:
                    self._owes_pong = False
                    await self._socket.pong()
                if (piece := next(pieces, None)) is not None:
                    await self._socket.send_bytes(piece)
                elif self._large:
                    head, body = self._large.popleft()
                    self.size -= len(body)
                    pieces = cut(pack(self._heads, [(head, body)]))
                elif not (self._items or self._owes_pong):
                    return
        except (aiohttp.ClientError, ConnectionError):
            self._items.clear()
            self._large.clear()
            self.size = 0
            self._on_broken()
        finally:
            self._writing = None

    def _next(self) -> list[tuple[H, bytes]]:
        items, size, number = self._items, 0, 0
        for number, (_, body) in enumerate(items, 1):
            size += len(body)
            if number == FULL_COUNT or size >= FULL_MESSAGE:
                break
        self.size -= size
        self._items = items[number:]
        return items[:number]


class Asking:
    """The end that asks. `is_open` until the connection ends, however it does."""

    def __init__(self, socket: Socket) -> None:
        self.is_open = True
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outbox = _Outbox(socket, ASKS, self.end)
        self._pieces = Pieces()

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

    def hear(self, message: bytes) -> None:
        """Hand on the answers of a message. Raises `ValueError` for what is none."""
        if is_piece(message):
            self._outbox.pong()
            if (whole := self._pieces.add(message)) is None:
                return
            message = whole
        for (number, status, content_type, _), content in unpack(ANSWERS, message):
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(Answer(status, content_type, content))

    def end(self) -> None:
        """Nothing more is answered: whoever waits is told."""
        self.is_open = False
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionError("the connection dropped"))


class Answering:
    """The end that answers, each request in a task of its own: what was begun goes on when the connection ends, and is
    waited for when the request comes again over another.

    While `MAX_REQUESTS` are carried out, or their answers not taken, or `MAX_UNSENT` bytes, the others wait unread.
    `most` are the bytes of the largest message.
    """

    def __init__(self, socket: Socket, carry: Carry, most: int = MAX_WHOLE) -> None:
        self._socket = socket
        self._carry = carry
        self._working: set[asyncio.Task[None]] = set()
        self._outbox = _Outbox(socket, ANSWERS, lambda: None)
        self._pieces = Pieces(most)

    async def run(self, on_text: Callable[[str], None] | None = None) -> None:
        """Answer until the connection ends, or says what is no request (`ValueError`). Text messages are for
        `on_text`."""
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.TEXT and on_text is not None:
                on_text(message.data)
                continue
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            asked: bytes = message.data
            if is_piece(asked):
                self._outbox.pong()
                if (whole := self._pieces.add(asked)) is None:
                    continue
                asked = whole
            for head, body in unpack(ASKS, asked):
                task = asyncio.create_task(self._answer(head, body))
                self._working.add(task)
                task.add_done_callback(self._working.discard)
            await asyncio.sleep(0)  # begin, and send what is done: the other end then works at the same time
            while self._is_full and not self._socket.closed:  # which wakes nobody here
                await asyncio.wait(self._busy, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def finish(self) -> None:
        """Wait until what was asked is answered, and sent."""
        while self._busy and not self._socket.closed:
            await asyncio.wait(self._busy)

    @property
    def _is_full(self) -> bool:
        return len(self._working) + len(self._outbox) > MAX_REQUESTS or self._outbox.size > MAX_UNSENT

    @property
    def _busy(self) -> list[asyncio.Task[None]]:
        return [*self._working, *self._outbox.writing]

    async def _answer(self, head: AskHead, body: bytes) -> None:
        number, method, target, _ = head
        answer = await self._carry(method, target, body)
        if len(answer.content) > MAX_BODY:
            answer = problem_answer(Problem(413, "too-large", f"the answer has more than {MAX_BODY} bytes"))
        if not self._socket.closed:
            self._outbox.put((number, answer.status, answer.content_type, len(answer.content)), answer.content)
