"""The server's answers: every request to a session, an environment or the server's state, every error to a problem."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import WSCloseCode, web
from pydantic import BaseModel, ValidationError
from yarl import URL

from envgym.env import EnvSpec
from envgym.listening import is_loopback

from . import openapi
from .connections import SERVER, Connections, problem_answer, problem_response
from .encoding import encode
from .frames import CHANNEL_BODY, CHANNEL_PING_SECONDS, Answer
from .hosted import Hosted
from .limits import Limits
from .links import CLOSE_SECONDS, Answering, Socket, end
from .prometheus import CONTENT_TYPE, ServerMetrics
from .routes import Route, match
from .sessions import RETRY_SECONDS, Sessions
from .tokens import ANYONE, Client, Tokens
from .wire import (
    Alive,
    Batch,
    BatchClose,
    BatchOpen,
    BatchStep,
    EnvList,
    Group,
    Health,
    Heartbeat,
    Opening,
    Problem,
    ProblemBody,
    Step,
    TaskQuery,
)

SHUTDOWN_SECONDS = 10.0
"""How long requests in flight may take to finish at the end."""

MAX_CHANNEL_MESSAGE = 2 * CHANNEL_BODY
"""Bytes of the largest message over a channel: what is larger is sent as a request of its own."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Call:
    """One request that was let in: whose it is, what stands in its path, its query and its body, read and raw; and the
    request itself, where it came over HTTP."""

    client: Client
    values: list[str]
    query: Any = None
    body: Any = None
    raw: bytes = b""
    request: web.BaseRequest | None = None


class Application:
    """The routes over some environments, and their sessions."""

    def __init__(self, specs: Mapping[str, EnvSpec], limits: Limits, tokens: Tokens | None) -> None:
        self._counts = ServerMetrics(lambda: self.sessions.open_by_env())
        self._environments = {name: Hosted(name, spec, limits, self._counts) for name, spec in specs.items()}
        self.sessions = Sessions(self._environments, limits, self._counts)
        self._limits = limits
        self._tokens = tokens
        self._openapi = openapi.document(list(specs), tokens=tokens is not None)
        self._channels: dict[web.WebSocketResponse, asyncio.Transport] = {}
        self._links: set[Answering] = set()
        self._is_ending = False
        self._in_flight: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def running(
        self, listener: socket.socket | None = None, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[None]:
        """Answer requests on `listener`, if any; on leaving, let those in flight finish and close every session."""
        runner = web.ServerRunner(Connections(self._handle, self._limits.max_body), shutdown_timeout=SHUTDOWN_SECONDS)
        await runner.setup()
        reaper = asyncio.create_task(self._reap())
        try:
            if listener is not None:
                await web.SockSite(runner, listener, backlog=1024, ssl_context=tls).start()
            yield
        finally:
            self.sessions.draining = self._is_ending = True
            reaper.cancel()
            going_away = (end(link, WSCloseCode.GOING_AWAY, below) for link, below in self._channels.items())
            await asyncio.gather(*going_away)
            await runner.cleanup()
            await self.sessions.close_all()

    async def drain(self) -> None:
        """Take no new sessions, and wait until those there are have been closed and every request is answered, as long
        as the limits allow."""
        self.sessions.draining = True
        if len(self.sessions):
            seconds = self._limits.drain_seconds
            logger.warning("sessions still open: %d; they may go on for %g s", len(self.sessions), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_seconds):
                await self.sessions.emptied()
                if self._in_flight:
                    await asyncio.wait(self._in_flight)
                await asyncio.gather(*(link.finish() for link in self._links))

    async def _reap(self) -> None:
        loop, seconds = asyncio.get_running_loop(), self._limits.lease_seconds / 10
        while True:
            due = loop.time() + seconds
            await asyncio.sleep(seconds)
            if loop.time() > due + seconds:
                continue  # something held the loop up: the heartbeats that came meanwhile are still to be read
            try:
                await self.sessions.close_expired()
            except Exception:
                logger.exception("closing expired sessions")

    # -- routes -------------------------------------------------------------------------------------------

    async def list_envs(self, call: Call) -> bytes:
        envs = tuple(hosted.describe() for hosted in self._environments.values())
        limits = self._limits
        room = min(limits.max_sessions, call.client.max_sessions or limits.max_sessions)
        return encode(EnvList(envs=envs, lease_seconds=limits.lease_seconds, max_sessions=room))

    async def describe(self, call: Call) -> bytes:
        return encode(self.sessions.environment(call.values[0]).describe())

    async def tasks(self, call: Call) -> bytes:
        query: TaskQuery = call.query
        return await self.sessions.environment(call.values[0]).page(query)

    async def score_group(self, call: Call) -> bytes:
        group: Group = call.body
        return await self.sessions.environment(call.values[0]).score_group(call.client.name, group, call.raw)

    async def open(self, call: Call) -> bytes:
        opening: Opening = call.body
        return await self.sessions.open(call.client, opening).open()

    async def heartbeat(self, call: Call) -> bytes:
        heartbeat: Heartbeat = call.body
        return encode(Alive(alive=self.sessions.alive(call.client, heartbeat.session_ids)))

    async def step(self, call: Call) -> bytes:
        step: Step = call.body
        return await self.sessions.get(call.client, call.values[0]).step(step)

    async def close(self, call: Call) -> None:
        await self.sessions.close(call.client.name, call.values[0])

    async def batch(self, call: Call) -> bytes:
        batch: Batch = call.body
        working = [asyncio.create_task(self._of_batch(call.client, request)) for request in batch.requests]
        return b'{"answers":[' + b",".join([await work for work in working]) + b"]}"

    async def _of_batch(self, client: Client, request: BatchOpen | BatchStep | BatchClose) -> bytes:
        """The answer to one request of a batch, an encoded `BatchAnswer`."""
        try:
            if isinstance(request, BatchStep):
                done = await self.sessions.get(client, request.session_id).step(request)
            elif isinstance(request, BatchOpen):
                done = await self.sessions.open(client, request).open()
            else:
                await self.sessions.close(client.name, request.session_id)
                return b'{"status":204,"body":null}'
        except Exception as error:
            problem = error if isinstance(error, Problem) else _defect("POST", "/v1/batch")
            self._count_refusal(problem.body)
            return b'{"status":%d,"body":%b}' % (problem.status, encode(problem.body))
        return b'{"status":200,"body":' + done + b"}"

    async def live(self, call: Call) -> bytes:
        return encode(Health(status="ok"))

    async def ready(self, call: Call) -> bytes:
        if self.sessions.draining:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        return encode(Health(status="ready"))

    async def metrics(self, call: Call) -> Answer:
        return Answer(200, CONTENT_TYPE, self._counts.text().encode())

    async def openapi(self, call: Call) -> bytes:
        return self._openapi

    async def channel(self, call: Call) -> web.WebSocketResponse:
        """Answer the requests that come over a WebSocket until it ends."""
        socket = web.WebSocketResponse(
            timeout=CLOSE_SECONDS,
            heartbeat=CHANNEL_PING_SECONDS,
            max_msg_size=MAX_CHANNEL_MESSAGE,
            compress=False,  # nothing that is sent grows in memory
        )
        transport = None if call.request is None else call.request.transport
        if call.request is None or transport is None or not socket.can_prepare(call.request):
            raise _UpgradeRequired()
        if self._is_ending:
            raise Problem(503, "shutting-down", "the server is shutting down", retry_after=RETRY_SECONDS)
        socket.headers["Server"] = SERVER
        try:
            await socket.prepare(call.request)
        except ConnectionError:
            raise Problem(400, "invalid-request", "the connection ended before it was a WebSocket") from None
        self._channels[socket] = transport
        try:
            async with self.answering(socket, call.client) as answering:
                await answering.run()
        except ValueError:
            logger.warning("a channel of %s said what is no request; it is closed", call.client.name)
        finally:
            del self._channels[socket]
            await end(socket, transport=transport)
        return socket

    @contextlib.asynccontextmanager
    async def answering(self, socket: Socket, client: Client) -> AsyncIterator[Answering]:
        """The end of a WebSocket of `client` that answers; `drain` waits for what it has to answer."""
        answering = Answering(socket, functools.partial(self.answer, client))
        self._links.add(answering)
        try:
            yield answering
        finally:
            self._links.discard(answering)

    # -- from request to call -----------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; every error is a problem, and the server lives on."""
        try:
            route, call = await self._admit(request)
            # In a task of its own: what an environment's step leaves in its context is not the next request's.
            working = asyncio.create_task(self._carry_out(route, call))
            if route.name != "channel":
                self._in_flight.add(working)
                working.add_done_callback(self._in_flight.discard)
            answer = await working
        except Problem as problem:
            return self._refuse(request, problem)
        except Exception:
            return self._refuse(request, _defect(request.method, request.rel_url.raw_path))
        if isinstance(answer, web.StreamResponse):
            return answer
        head = {"Content-Type": answer.content_type, "Server": SERVER} if answer.content_type else {"Server": SERVER}
        return web.Response(body=answer.content or None, status=answer.status, headers=head)

    async def answer(self, client: Client, method: str, target: str, body: bytes) -> Answer:
        """The answer to a request that came over a WebSocket, of a client that was let in. `target` is a path with its
        query. Every error is a problem."""
        try:
            if len(body) > self._limits.max_body:
                raise Problem(413, "too-large", f"a body has at most {self._limits.max_body} bytes")
            answer = await self._carry_out(*_admitted(client, method, target, body))
            assert isinstance(answer, Answer)
            return answer
        except Problem as problem:
            self._count_refusal(problem.body)
            return problem_answer(problem)
        except Exception:
            return problem_answer(_defect(method, target))

    async def _carry_out(self, route: Route, call: Call) -> Answer | web.WebSocketResponse:
        answer: bytes | Answer | web.WebSocketResponse | None = await getattr(self, route.name)(call)
        if isinstance(answer, bytes):
            return Answer(200, "application/json", answer)
        return _DONE if answer is None else answer

    async def _admit(self, request: web.BaseRequest) -> tuple[Route, Call]:
        """The route and the call of a request. Raises a `Problem` where it may not, or cannot, be carried out."""
        routes, values = _NO_ROUTES
        missing: Problem | None = None
        try:
            routes, values = match(request.rel_url.raw_path)
        except Problem as problem:
            missing = problem
        method = "GET" if request.method == "HEAD" else request.method
        route = routes.get(method)
        client = ANYONE
        if self._tokens is None:
            refuse_web_pages(request.headers.get("Host", ""), request.headers.get("Origin"))
        elif route is None or not route.open:  # who has no token is not told what there is
            client = self._tokens.client(request.headers.get("Authorization"))
        if missing is not None:
            raise missing
        if route is None:
            raise _MethodNotAllowed(routes)
        call = Call(client, values, request=request)
        if route.query is not None:
            call.query = _query(route.query, request.rel_url)
        if route.body is not None:
            call.raw = await self._read(request)
            call.body = _parse(route.body, call.raw)
        return route, call

    async def _read(self, request: web.BaseRequest) -> bytes:
        # Web pages can make a browser post plain text to a loopback address, but not JSON.
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise Problem(415, "invalid-request", "send the body as application/json, not compressed")
        limit = self._limits.max_body
        too_large = Problem(413, "too-large", f"a body has at most {limit} bytes")
        if (request.content_length or 0) > limit:
            raise too_large
        if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            if request.content.is_eof():  # it came with the head
                return await request.read()
            async with asyncio.timeout(self._limits.body_seconds):
                return await request.read()
        except TimeoutError:
            detail = f"the body did not arrive within {self._limits.body_seconds:g} s"
            raise Problem(408, "too-slow", detail) from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except Exception as error:  # a broken chunk, a connection that ended: whatever it is, the sender's
            raise Problem(400, "invalid-request", f"the body cannot be read ({type(error).__name__})") from None

    def _refuse(self, request: web.BaseRequest, problem: Problem) -> web.Response:
        self._count_refusal(problem.body)
        response = problem_response(problem)
        if isinstance(problem, _MethodNotAllowed):
            response.headers["Allow"] = ", ".join(problem.allowed)
        if isinstance(problem, _UpgradeRequired):
            response.headers.update(Connection="Upgrade", Upgrade="websocket")
        if not request.content.is_eof():  # the rest of the body is not wanted
            response.force_close()
        return response

    def _count_refusal(self, problem: ProblemBody) -> None:
        if problem.kind not in ("environment-error", "environment-timeout"):
            self._counts.rejected.add(problem.kind)


def _admitted(client: Client, method: str, target: str, body: bytes) -> tuple[Route, Call]:
    path, _, query = target.partition("?")
    routes, values = match(path)
    route = routes.get(method)
    if route is None:
        raise _MethodNotAllowed(routes)
    call = Call(client, values)
    if route.query is not None:
        call.query = _query(route.query, URL.build(query_string=query, encoded=True))
    if route.body is not None:
        call.raw, call.body = body, _parse(route.body, body)
    return route, call


def _defect(method: str, target: str) -> Problem:
    logger.exception("%s %s", method, target)
    return Problem(500, "internal-error", "a defect of the server; its log has more")


_DONE = Answer(204, "", b"")
_NO_ROUTES: tuple[Mapping[str, Route], list[str]] = ({}, [])


class _UpgradeRequired(Problem):
    def __init__(self) -> None:
        super().__init__(426, "invalid-request", "this path is for a WebSocket")


class _MethodNotAllowed(Problem):
    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.allowed = sorted({*routes, *(["HEAD"] if "GET" in routes else [])})
        super().__init__(405, "invalid-request", f"this path answers {', '.join(self.allowed)}")


def refuse_web_pages(host: str, origin: str | None) -> None:
    """A server without tokens is for programs of this machine.

    A page in a browser here can reach it as well, and by a name of its own that points here (DNS rebinding) read what
    it answers. Browsers say so: in `Origin`, and in `Host`.
    """
    if origin is not None:
        raise Problem(403, "forbidden", "web pages may not use a server without tokens")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise Problem(403, "forbidden", "without tokens this server answers to localhost, 127.0.0.1 and [::1] only")


def _query(model: type[BaseModel], url: URL) -> BaseModel:
    given = url.query
    if len(given) > len(set(given)):
        raise Problem(422, "invalid-request", "a parameter of the query comes twice")
    try:
        return model.model_validate_strings(dict(given))
    except ValidationError as error:
        raise _invalid(error, "the query") from None


def _parse(model: type[BaseModel], body: bytes) -> BaseModel:
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise _invalid(error, "the body") from None


def _invalid(error: ValidationError, whole: str) -> Problem:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    detail = f"{where}: {first['msg'].lower()}".encode("utf-8", "replace").decode()
    return Problem(422, "invalid-request", detail)
