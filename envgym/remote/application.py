"""The server's answers: every request to a session, an environment or the server's state, every error to a problem."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import WSCloseCode, web

from envgym.env import EnvSpec
from envgym.net.problems import Problem
from envgym.net.server import RETRY_SECONDS, SERVER, Connections, serve_requests, to_problem
from envgym.net.tokens import ServerClient, Tokens

from .admission import Call, ServerLimits, call_of_message, call_of_request
from .channel import ChannelServer, close_socket, server_socket
from .encoding import encode
from .metrics import CONTENT_TYPE, ServerMetrics
from .routes import Route
from .served_env import ServedEnv
from .sessions import Sessions
from .wire import Alive, Answer, EnvList, Health

SHUTDOWN_SECONDS = 0.5
"""Time limit for sending answers at the end. Earlier requests have had the time to drain."""

logger = logging.getLogger(__name__)


class Application:
    """The routes over some environments, and their sessions."""

    def __init__(self, specs: Mapping[str, EnvSpec], limits: ServerLimits, tokens: Tokens | None) -> None:
        self._counts = ServerMetrics()
        self._environments = {
            name: ServedEnv(name, spec, limits.call_seconds, self._counts) for name, spec in specs.items()
        }
        self.sessions = Sessions(self._environments, limits, self._counts)
        self._limits = limits
        self._tokens = tokens
        self._channels: dict[ChannelServer, tuple[web.WebSocketResponse, asyncio.Transport]] = {}
        self._is_ending = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def serve_requests(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        """Answer requests on `listener`; on leaving, let those in flight finish and close every session."""
        connections = Connections(self._handle, self._count)
        try:
            async with serve_requests(connections, listener, tls=tls, drain=SHUTDOWN_SECONDS):
                reaper = asyncio.create_task(self._reap())
                try:
                    yield
                finally:
                    self.sessions.is_draining = self._is_ending = True
                    reaper.cancel()
                    channels = list(self._channels.values())
                    await asyncio.gather(*(close_socket(link, WSCloseCode.GOING_AWAY, tcp) for link, tcp in channels))
        finally:
            await self.sessions.close_all()

    async def drain(self) -> None:
        """Reject new sessions, and wait for `drain_seconds` at most until the open ones are closed and every request is
        answered."""
        self.sessions.is_draining = True
        if len(self.sessions):
            seconds = self._limits.drain_seconds
            logger.warning("sessions still open: %d; they may continue for %g s", len(self.sessions), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_seconds):
                await self.sessions.wait_until_empty()
                if self._in_flight:
                    await asyncio.wait(self._in_flight)
                await asyncio.gather(*(channel.finish() for channel in list(self._channels)))

    async def _reap(self) -> None:
        """Close the sessions whose lease has expired, again and again."""
        loop, seconds = asyncio.get_running_loop(), self._limits.lease_seconds / 10
        while True:
            wake_time = loop.time() + seconds
            await asyncio.sleep(seconds)
            if loop.time() > wake_time + seconds:
                continue  # the loop was blocked: heartbeats that came meanwhile are still unread
            try:
                await self.sessions.close_expired()
            except Exception:
                logger.exception("closing expired sessions")

    # -- routes -------------------------------------------------------------------------------------------

    async def list_envs(self, call: Call) -> bytes:
        envs = tuple([await env.describe() for env in self._environments.values()])
        limits = self._limits
        capacity = min(limits.max_sessions, call.client.max_sessions or limits.max_sessions)
        return encode(EnvList(envs=envs, lease_seconds=limits.lease_seconds, max_sessions=capacity))

    async def describe(self, call: Call) -> bytes:
        return encode(await self.sessions.environment(call.values[0]).describe())

    async def tasks(self, call: Call) -> bytes:
        return await self.sessions.environment(call.values[0]).page(call.query)

    async def score_group(self, call: Call) -> bytes:
        return await self.sessions.environment(call.values[0]).score_group(call.client.name, call.body, call.raw)

    async def open(self, call: Call) -> bytes:
        return await self.sessions.open(call.client, call.body).open()

    async def heartbeat(self, call: Call) -> bytes:
        return encode(Alive(alive=self.sessions.renew(call.client, call.body.session_ids)))

    async def step(self, call: Call) -> bytes:
        return await self.sessions.get(call.client, call.values[0]).step(call.body)

    async def close(self, call: Call) -> None:
        await self.sessions.close(call.client.name, call.values[0])

    async def live(self, call: Call) -> bytes:
        return encode(Health(status="ok"))

    async def ready(self, call: Call) -> bytes:
        if self.sessions.is_draining:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        return encode(Health(status="ready"))

    async def metrics(self, call: Call) -> Answer:
        return Answer(200, CONTENT_TYPE, self._counts.text())

    async def channel(self, call: Call) -> web.WebSocketResponse:
        """Answer the requests that come over a WebSocket until it ends."""
        socket = server_socket()
        transport = None if call.request is None else call.request.transport
        if call.request is None or transport is None or not socket.can_prepare(call.request):
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
            raise Problem(426, "invalid-request", "this path is for a WebSocket", headers=upgrade)
        if self._is_ending:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        socket.headers["Server"] = SERVER
        try:
            await socket.prepare(call.request)
        except ConnectionError:
            raise Problem(400, "invalid-request", "the connection ended before it was a WebSocket") from None
        channel = ChannelServer(socket, functools.partial(self._answer, call.client))
        self._channels[channel] = socket, transport
        try:
            await channel.run()
        except ValueError:
            logger.warning("a channel of %s carried a malformed request; it is closed", call.client.name)
        finally:
            del self._channels[channel]
            await close_socket(socket, transport=transport)
        return socket

    # -- from request to answer ---------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer to one request. Raises a `Problem`, or another exception for a defect of the server, which keeps
        running."""
        route, call = await call_of_request(request, self._limits, self._tokens)
        # A separate task: context variables that an environment sets must not reach the next request.
        task = asyncio.create_task(self._carry_out(route, call))
        if route.name != "channel":
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
        answer = await task
        if isinstance(answer, web.StreamResponse):
            return answer
        head = {"Content-Type": answer.content_type, "Server": SERVER} if answer.content_type else {"Server": SERVER}
        return web.Response(body=answer.content or None, status=answer.status, headers=head)

    async def _answer(self, client: ServerClient, method: str, target: str, body: bytes) -> Answer:
        """The answer to a request over a channel. Every error becomes a problem."""
        try:
            answer = await self._carry_out(*call_of_message(client, method, target, body, self._limits))
            assert isinstance(answer, Answer)
            return answer
        except Exception as error:
            problem = to_problem(error, method, target)
        self._count(problem)
        return Answer(problem.status, problem.content_type, problem.content)

    async def _carry_out(self, route: Route, call: Call) -> Answer | web.WebSocketResponse:
        answer: bytes | Answer | web.WebSocketResponse | None = await getattr(self, route.name)(call)
        if isinstance(answer, bytes):
            return Answer(200, "application/json", answer)
        return _DONE if answer is None else answer

    def _count(self, problem: Problem) -> None:
        if problem.body.kind not in ("environment-error", "environment-timeout"):
            self._counts.rejected.labels(problem.body.kind).inc()


_DONE = Answer(204, "", b"")
