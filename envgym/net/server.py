"""The kit of every server: who is let in, bodies within limits, errors as problems, and an end that drains.

What is no HTTP at all is answered as a problem too, and logged without what it says: it may hold a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from aiohttp import web
from pydantic import BaseModel, ValidationError

from .listening import is_loopback
from .problems import Problem
from .tokens import ANYONE, ServerClient, Tokens

MAX_BODY = 64 * 2**20
"""Bytes of the largest request that a server takes, unless it says otherwise."""
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


@asynccontextmanager
async def running(
    server: web.Application | web.Server, listener: socket.socket, *, tls: ssl.SSLContext | None = None, drain: float
) -> AsyncIterator[None]:
    """Answer requests on `listener`; on leaving, let those in flight finish, for `drain` seconds at most."""
    runner: web.BaseRunner
    if isinstance(server, web.Application):
        runner = web.AppRunner(server, access_log=None, shutdown_timeout=drain)
    else:
        runner = web.ServerRunner(server, shutdown_timeout=drain)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


# ---------------------------------------------------------------------------------------------------------
# Who is let in


def admitted(request: web.BaseRequest, tokens: Tokens | None) -> ServerClient:
    """The client that sent a request. Raises a 401 `Problem` for one without a token, and on a server without tokens,
    which is for programs of this machine, a 403 for a web page.

    A page in a browser here can reach it as well, and by a name of its own that points here (DNS rebinding) read what
    it answers. Browsers say so: in `Origin`, and in `Host`.
    """
    if tokens is not None:
        return tokens.client(request.headers.get("Authorization"))
    if "Origin" in request.headers:
        raise Problem(403, "forbidden", "web pages may not use a server without tokens")
    host = request.headers.get("Host", "")
    if not is_loopback(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]):
        raise Problem(403, "forbidden", "without tokens this server answers to localhost, 127.0.0.1 and [::1] only")
    return ANYONE


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


def parse(model: type[M], body: bytes) -> M:
    """The body as a `model`. Raises a 422 `Problem`."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid(error, "the body") from None


def invalid(error: ValidationError, whole: str) -> Problem:
    """The 422 `Problem` of what is not as it should be: its first field that is not, or the `whole`."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    detail = f"{where}: {first['msg'].lower()}".encode("utf-8", "replace").decode()
    return Problem(422, "invalid-request", detail)


# ---------------------------------------------------------------------------------------------------------
# Errors


def problem_of(error: Exception, method: str, target: str) -> Problem:
    """A problem in place of any exception; one that is nobody's fault but the server's is logged."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, web.HTTPException):  # aiohttp's own: no such route, method or room
        return Problem(error.status, "invalid-request", f"{error.status} {error.reason.lower()}")
    logger.error("%s %s", method, target, exc_info=error)
    return Problem(500, "internal-error", "a defect of the server; its log has more")


def problem_response(problem: Problem, request: web.BaseRequest | None = None) -> web.Response:
    """A problem as it is sent over HTTP, to the sender of a `request` that could be read."""
    headers = {"Server": SERVER, **problem.headers}
    content, content_type = problem.content, problem.content_type
    response = web.Response(body=content, status=problem.status, content_type=content_type, headers=headers)
    if request is None or not request.content.is_eof():  # the rest of the body is not wanted
        response.force_close()
    return response


# ---------------------------------------------------------------------------------------------------------
# Connections


class Connections(web.Server):
    """Hands every request of every connection to `answer`; what it raises is answered as a problem, which `on_problem`
    is given too."""

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        max_body: int,
        on_problem: Callable[[Problem], None] = lambda problem: None,
    ) -> None:
        loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await answer(request)
            except Exception as error:
                problem = problem_of(error, request.method, request.rel_url.raw_path)
            on_problem(problem)
            return problem_response(problem, request)

        super().__init__(handle, request_factory=request)
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
        return problem_response(problem)
