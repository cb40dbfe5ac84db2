"""From a connection to a call: which requests are well-formed, whose they are, and what they ask for.

What is no HTTP at all is answered as a problem too, and logged without what it says: it may hold a token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from aiohttp import web
from pydantic import BaseModel, ValidationError
from yarl import URL

from .access import ANYONE, Client, Tokens, refuse_web_pages
from .routes import Route, match
from .wire import MAX_BODY, Answer, Problem

RETRY_SECONDS = 1.0
"""Pause after which a client that was refused for want of room should ask again."""
LINGER_SECONDS = 5.0
"""Time in which the rest of a refused body is still read (and thrown away), so that its sender reads why."""
KEEPALIVE_SECONDS = 75.0
"""Time limit for a connection without a whole request on it."""
MAX_ARRIVING = 2**28
"""Bytes of all bodies that are not whole yet, in this process: connections are many, and whoever opens them need not
finish anything."""
SERVER = "envgym"
"""The header `Server`: which versions run here is nobody's business."""

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's limits. Those of single clients are in the token file."""

    max_sessions: int = 10_000
    """Sessions open at once. Opening one more is answered with 429."""
    lease_seconds: float = 60.0
    """After this long without a request or a heartbeat a session is closed: its client is gone. An environment at
    work does not count as idle."""
    call_seconds: float = 600.0
    """Time limit for an environment to answer one reset, to read one page of tasks or to judge one group. The
    limit of a step is the environment's own (`call_timeout`)."""
    body_seconds: float = 60.0
    """Time limit for a request's body to arrive."""
    max_body: int = MAX_BODY
    """Bytes of the largest body."""
    drain_seconds: float = 20.0
    """Time for which sessions may go on once the server is asked to stop."""


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


class MethodNotAllowed(Problem):
    """The path is there, for other methods."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.allowed = sorted({*routes, *(["HEAD"] if "GET" in routes else [])})
        super().__init__(405, "invalid-request", f"this path answers {', '.join(self.allowed)}")


class Admission:
    """The requests a server lets in. Without `tokens` those are all of this machine's programs."""

    def __init__(self, limits: Limits, tokens: Tokens | None) -> None:
        self._limits = limits
        self._tokens = tokens

    async def of_request(self, request: web.BaseRequest) -> tuple[Route, Call]:
        """The route and the call of a request. Raises a `Problem` where it may not, or cannot, be carried out."""
        routes: Mapping[str, Route] = {}
        values: list[str] = []
        missing: Problem | None = None
        try:
            routes, values = match(request.rel_url.raw_path)
        except Problem as problem:
            missing = problem
        route = routes.get("GET" if request.method == "HEAD" else request.method)
        client = ANYONE
        if self._tokens is None:
            refuse_web_pages(request.headers.get("Host", ""), request.headers.get("Origin"))
        elif route is None or not route.open:  # who has no token is not told what there is
            client = self._tokens.client(request.headers.get("Authorization"))
        if missing is not None:
            raise missing
        if route is None:
            raise MethodNotAllowed(routes)
        body = b"" if route.body is None else await read_json(request, self._limits.max_body, self._limits.body_seconds)
        return route, _call(route, Call(client, values, raw=body, request=request), request.rel_url)

    def of_message(self, client: Client, method: str, target: str, body: bytes) -> tuple[Route, Call]:
        """The route and the call of a request over a channel, of a client that was let in. Raises a `Problem` as
        `of_request` does. `target` is a path with its query."""
        if len(body) > self._limits.max_body:
            raise Problem(413, "too-large", f"a body has at most {self._limits.max_body} bytes")
        path, _, query = target.partition("?")
        routes, values = match(path)
        route = routes.get(method)
        if route is None:
            raise MethodNotAllowed(routes)
        return route, _call(route, Call(client, values, raw=body), URL.build(query_string=query, encoded=True))


def _call(route: Route, call: Call, url: URL) -> Call:
    """The call with its query and its body read."""
    if route.query is not None:
        if len(url.query) > len(set(url.query)):
            raise Problem(422, "invalid-request", "a parameter of the query comes twice")
        try:
            call.query = route.query.model_validate_strings(dict(url.query))
        except ValidationError as error:
            raise _invalid(error, "the query") from None
    if route.body is not None:
        call.body = parse(route.body, call.raw)
    return call


def parse(model: type[M], body: bytes) -> M:
    """The body as a `model`. Raises a 422 `Problem`."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise _invalid(error, "the body") from None


def _invalid(error: ValidationError, whole: str) -> Problem:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    detail = f"{where}: {first['msg'].lower()}".encode("utf-8", "replace").decode()
    return Problem(422, "invalid-request", detail)


# ---------------------------------------------------------------------------------------------------------
# Bodies


async def read_json(request: web.BaseRequest, limit: int, seconds: float) -> bytes:
    """The body of a request, of at most `limit` bytes, which may take so many seconds to arrive. Raises a `Problem`."""
    # Web pages can make a browser post plain text to a loopback address, but not JSON.
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise Problem(415, "invalid-request", "send the body as application/json, not compressed")
    too_large = Problem(413, "too-large", f"a body has at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        if request.content.is_eof():  # it came with the head
            return await request.read()
        arriving = Arriving(limit)
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                arriving.add(part)
        return arriving.whole()
    except TimeoutError:
        raise Problem(408, "too-slow", f"the body did not arrive within {seconds:g} s") from None
    except OverflowError:
        raise too_large from None
    except BufferError:
        detail = "too much arrives at once; send it again"
        raise Problem(429, "server-full", detail, retry_after=RETRY_SECONDS) from None
    except Exception as error:  # a broken chunk, a connection that ended: whatever it is, the sender's
        raise Problem(400, "invalid-request", f"the body cannot be read ({type(error).__name__})") from None


class Arriving:
    """The part that has arrived of one body of at most `most` bytes.

    Where all together are too much, the one that has been waiting for its next part the longest is given up.
    """

    _begun: ClassVar[WeakSet[Arriving]] = WeakSet()
    _order: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts = bytearray()
        self._last = 0
        self._is_lost = False

    def add(self, part: bytes) -> None:
        """Append a part. Raises `OverflowError` where the body is too large, `BufferError` where it was given up."""
        if len(self._parts) + len(part) > self._most:
            raise OverflowError(f"it has more than {self._most} bytes")
        self._last = next(self._order)
        self._begun.add(self)
        while sum(len(each._parts) for each in self._begun) + len(part) > MAX_ARRIVING:
            min(self._begun, key=lambda each: each._last)._give_up()
        if self._is_lost:
            raise BufferError("too much arrives at once")
        self._parts += part

    def whole(self) -> bytes:
        """All of it."""
        self._begun.discard(self)
        return bytes(self._parts)

    def _give_up(self) -> None:
        self._is_lost, self._parts = True, bytearray()
        self._begun.discard(self)


# ---------------------------------------------------------------------------------------------------------
# Connections


def problem_answer(problem: Problem) -> Answer:
    """A problem as it is sent."""
    content = json.dumps(problem.body.model_dump(exclude_defaults=True)).encode()
    return Answer(problem.status, "application/problem+json", content)


def problem_response(problem: Problem) -> web.Response:
    """A problem as it is sent over HTTP."""
    answer = problem_answer(problem)
    response = web.Response(body=answer.content, status=answer.status, content_type=answer.content_type)
    response.headers["Server"] = SERVER
    if problem.body.retry_after is not None:
        response.headers["Retry-After"] = f"{max(1, round(problem.body.retry_after))}"
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(problem, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(problem.allowed)
    return response


class Connections(web.Server):
    """Hands every request of every connection to `handler`."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], max_body: int) -> None:
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body)

        super().__init__(handler, request_factory=request)
        self._loop_of_connections = loop

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop_of_connections,
            access_log=None,  # type: ignore[arg-type]  # its own way to ask for none
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # nothing that is sent grows in memory
        )


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        # What is malformed may hold a token: neither log nor answer quotes it.
        logger.debug("a malformed request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        if status >= 500:
            logger.error("a defect of the server", exc_info=exc)
            problem = Problem(500, "internal-error", "a defect of the server; its log has more")
        else:
            problem = Problem(400, "invalid-request", "this is not a well-formed HTTP/1.1 request")
        response = problem_response(problem)
        response.force_close()
        return response
