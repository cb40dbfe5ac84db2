"""OpenEnv's wire: sessions at a server, each over a WebSocket that may drop and be attached anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp

from envgym.errors import printable_line
from envgym.net.client import HttpClient, NoAnswer, exchange, json_object
from envgym.net.retries import pauses
from envgym.processes.cancellation import pause_timeouts, start_task
from envgym.remote.transport import RemoteError

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before the second try and between the later ones, of a connection and of a full server."""
CALL_SECONDS = 20.0
"""Time limit for a request that takes no step."""
PING_SECONDS = 60.0
NO_METHOD = -32601
"""JSON-RPC's code for a method that the server does not have."""

Answer = dict[str, Any]
T = TypeVar("T")


class ServerRefusal(Exception):
    """An error that the server answers a message with: `code` as in OpenEnv, and a message in one line."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        errors = [item for item in error.get("errors") or () if isinstance(item, Mapping)]  # Pydantic's
        problems = (f"{'.'.join(map(str, item.get('loc') or ()))}: {item.get('msg')}" for item in errors)
        super().__init__(_line("; ".join(problems) or error.get("message")))
        self.code = str(error.get("code"))


class OpenEnvServer:
    """The sessions at one server, within one event loop. An episode leaves its session to another one, as long as there
    are any; the last one ends them all, since other clients may wait for their places.

    `wait` and `reconnect` are seconds of retries at a server that is full, or cannot be reached.
    """

    def __init__(self, url: str, secret: str, *, wait: float, reconnect: float) -> None:
        self.url = url
        self.http = HttpClient(secret=secret)
        self._patience = {"capacity": wait, "connection": reconnect}
        self._left: asyncio.Queue[Session] = asyncio.Queue()
        self._episodes = 0
        self._has_ids = True
        """False for a server whose sessions end with their socket."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> Session:
        """A session that an episode has left, or a new one; `leave` ends its use. Raises `RemoteError`."""
        self._episodes += 1
        try:
            return await self.retry(self._take, self._wait_for_left)
        except BaseException:
            self.leave(None)
            raise

    def leave(self, session: Session | None) -> None:
        """End an episode's use of a session (None: it got none). Does not wait for sessions that this ends."""
        self._episodes -= 1
        if session is not None and session.is_usable:
            self._left.put_nowait(session)
        elif session is not None:
            start_task(self._end(session), self._tasks)
        while not self._episodes and not self._left.empty():
            start_task(self._end(self._left.get_nowait()), self._tasks)

    async def retry(
        self, work: Callable[[], Awaitable[T]], pause: Callable[[float], Awaitable[Any]] = asyncio.sleep
    ) -> T:
        """The result of `work()`, repeated while the server is full or cannot be reached. The waiting counts as no
        episode's time. Raises `RemoteError`."""
        start, waits = time.monotonic(), pauses(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
        while True:
            try:
                return await work()
            except RemoteError as error:
                if time.monotonic() - start >= self._patience.get(error.kind, 0.0):
                    raise
            with pause_timeouts():
                await pause(next(waits))

    async def _wait_for_left(self, seconds: float) -> None:
        """Wait until an episode leaves its session, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                self._left.put_nowait(await self._left.get())

    async def _take(self) -> Session:
        while not self._left.empty():
            session = self._left.get_nowait()
            if session.is_connected:
                return session
            start_task(self._end(session), self._tasks)
        # A task of its own, so that the id is known, and the session ended, if the episode is cancelled meanwhile.
        creating = start_task(self._create(), self._tasks)
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._end_created)
            raise

    def _end_created(self, creating: asyncio.Task[Session]) -> None:
        if not creating.cancelled() and creating.exception() is None:
            start_task(self._end(creating.result()), self._tasks)

    async def _create(self) -> Session:
        answer = await self._rpc("openenv/session/create") if self._has_ids else None
        self._has_ids = answer is not None
        session = Session(self, str(answer["session_id"]) if answer else "")
        try:
            await session.attach()
        except BaseException:
            start_task(self._end(session), self._tasks)
            raise
        return session

    async def _end(self, session: Session) -> None:
        await session.detach()
        with contextlib.suppress(RemoteError):  # its episode is over in any case
            if session.id:
                await self._rpc("openenv/session/close", session_id=session.id)

    async def close(self) -> None:
        """End all sessions, and wait for it."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.http.close()

    async def _rpc(self, method: str, **params: Any) -> Answer | None:
        """The result of a JSON-RPC call; None if the server does not know the method. Raises `RemoteError`."""
        answer = await self.fetch("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        error = answer.get("error") or {}
        if not error and isinstance(result := answer.get("result"), dict):
            return result
        if error.get("code") == NO_METHOD:
            return None
        kind = "capacity" if "max_sessions" in (error.get("data") or ()) else "server"
        raise RemoteError(kind, f"{self.url}: {method} failed: {_line(error.get('message'))}")

    async def fetch(self, path: str, body: Answer | None = None) -> Answer:
        """The JSON object that the server answers with. Raises `RemoteError`."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            status, _, data = await exchange(self.http, method, self.url + path, content, seconds=CALL_SECONDS)
        except NoAnswer as failure:
            raise RemoteError("connection", f"{self.url} {failure}") from None
        if status < 400 and (answer := json_object(data)) is not None:
            return answer
        if status in (404, 405) and body is not None:
            return {"error": {"code": NO_METHOD}}
        hint = "its log says why" if status >= 500 else "is it an OpenEnv server?"
        hint = "set env.token_file to the file with its token" if status in (401, 403) else hint
        kind = "connection" if status in (502, 503, 504) else "refused"
        raise RemoteError(kind, f"{self.url}{path} answers {status}; {hint}")


class Session:
    """One instance of the environment at the server; `id` is empty if it ends with its socket. `ask` is called by one
    task at a time."""

    def __init__(self, server: OpenEnvServer, id: str) -> None:
        self.id = id
        self.is_usable = True
        """False once an answer is missing: then the server's state is unknown."""
        self._server = server
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Task[aiohttp.WSMessage]
        """Receives the next message, all the time: this also answers pings, however long the policy's turn takes."""

    @property
    def is_connected(self) -> bool:
        """False if the socket has dropped."""
        return self._socket is not None and not self._next.done()

    async def ask(self, kind: str, data: Answer) -> Answer:
        """The observation that `reset` or `step` is answered with. The message is sent once.

        Raises `ServerRefusal`, and `RemoteError`: `session_lost` if there is no answer, since the step may have been
        taken; `server` for another answer."""
        if not self.is_connected:
            await self._server.retry(self.attach)
        self.is_usable = False
        answer = await self._exchange({"type": kind, "data": data})
        if answer is None:
            raise RemoteError("session_lost", f"{self._server.url}: the connection dropped before the answer to {kind}")
        content = answer.get("data")
        if answer.get("type") == "error" and isinstance(content, dict):
            self.is_usable = content.get("code") == "VALIDATION_ERROR"
            raise ServerRefusal(content)
        if not isinstance(content, dict) or not isinstance(content.get("observation"), dict):
            raise RemoteError("server", f"{self._server.url}: answers {kind} with {_line(answer)}")
        self.is_usable = True
        return content

    async def attach(self) -> None:
        """Connect, for the first time or anew. `state` is asked, since only its answer shows that the session is there.
        Raises `RemoteError`."""
        has_dropped, url = self._socket is not None, self._server.url
        await self.detach()
        if has_dropped and not self.id:
            raise RemoteError("session_lost", f"{url}: the connection dropped, and the session with it")
        query = f"?session_id={self.id}" if self.id else ""
        try:
            socket = await self._server.http.connect(f"ws{url.removeprefix('http')}/ws{query}", heartbeat=PING_SECONDS)
        except NoAnswer as failure:
            raise RemoteError("connection", f"{url} {failure}") from None
        self._socket, self._next = socket, asyncio.create_task(socket.receive())
        answer = await self._exchange({"type": "state"})
        error = (answer or {}).get("data") or {}
        message = _line(error.get("message") or "the connection dropped again")
        if answer is None or "already" in message:  # has a socket, whose end the server has not noticed
            raise RemoteError("connection", f"{url}: {message}")
        kinds = {"CAPACITY_REACHED": "capacity", "SESSION_ERROR": "session_lost", "FACTORY_ERROR": "server"}
        if error.get("code") in kinds:
            raise RemoteError(kinds[error["code"]], f"{url}: {message}")

    async def _exchange(self, message: Answer) -> Answer | None:
        """The next answer after sending a message; None if the connection ended."""
        assert self._socket is not None
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):  # `receive` notices
            await self._socket.send_str(json.dumps(message))
        answer = await self._next  # which a cancellation ends: then the session is not usable
        if answer.type is not aiohttp.WSMsgType.TEXT:
            return None
        self._next = asyncio.create_task(self._socket.receive())
        return json_object(answer.data) or {}

    async def detach(self) -> None:
        """Close the socket, not the session."""
        if self._socket is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
            await self._socket.close()


def _line(value: Any) -> str:
    return printable_line(str(value))[:300]
