"""Building blocks of every server: authentication, size-limited bodies, errors as problems, and a draining shutdown.

Malformed HTTP is answered with a problem too, and logged without its content, which may hold a token.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar, TypeVar
from weakref import WeakSet

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from .listening import is_loopback
from .problems import Problem, main_error
from .tokens import ANYONE, ServerClient, Tokens

MAX_BODY = 64 * 2**20
"""Default of the maximum size of a request's body, in bytes."""
RETRY_SECONDS = 1.0
"""Suggested pause before the retry of a request rejected for lack of capacity."""
LINGER_SECONDS = 5.0
"""Time in which the rest of a rejected body is read and discarded, so that its sender reads the answer."""
KEEPALIVE_SECONDS = 75.0
"""Time limit for a connection without a complete request."""
MAX_ARRIVING = 2**28
"""Maximum number of bytes of all incomplete bodies in this process: clients can open many connections and finish no
request."""
SERVER = "envgym"
"""The header `Server`, without versions."""

logger = logging.getLogger(__name__)
application_logger = logging.getLogger(f"{__name__}.applications")
application_logger.addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)
"""Passes on nothing about malformed requests: aiohttp would quote them."""
M = TypeVar("M", bound=BaseModel)


@asynccontextmanager
async def serve_requests(
    server: web.Application | web.Server, listener: socket.socket, *, tls: ssl.SSLContext | None = None, drain: float
) -> AsyncIterator[None]:
    """Answer requests on `listener`; at the end wait for those in flight, for `drain` seconds at most."""
    runner: web.BaseRunner
    if isinstance(server, web.Application):
        runner = web.AppRunner(server, access_log=None, shutdown_timeout=drain, logger=application_logger)
    else:
        runner = web.ServerRunner(server, shutdown_timeout=drain)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


# ---------------------------------------------------------------------------------------------------------
# Authentication


def authenticate(request: web.BaseRequest, tokens: Tokens | None) -> ServerClient:
    """Authenticate a request and return its client. Raises a 401 `Problem` without a known token. A server without
    tokens is for programs of this machine: there a request of a web page raises a 403.

    A page in a local browser can reach such a server, and read its answers by a host name that resolves to this machine
    (DNS rebinding). The headers `Origin` and `Host` reveal both.
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
    """The body of a request: at most `limit` bytes, within `seconds`. Raises a `Problem`."""
    # Web pages can make a browser post plain text to a loopback address, but not JSON.
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise Problem(415, "invalid-request", "send the body as application/json, not compressed")
    too_large = Problem(413, "too-large", f"a body has at most {limit} bytes")
    if (request.content_length or 0) > limit:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        incoming = IncomingBody(limit)
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                incoming.add(part)
        return incoming.join()
    except TimeoutError:
        raise Problem(408, "too-slow", f"the body did not arrive within {seconds:g} s") from None
    except OverflowError:
        raise too_large from None
    except BufferError:
        detail = "too much arrives at once; send it again"
        raise Problem(429, "server-full", detail, retry_after=RETRY_SECONDS) from None
    except Exception as error:  # a broken chunk, a closed connection: always the sender's fault
        raise Problem(400, "invalid-request", f"the body cannot be read ({type(error).__name__})") from None


class IncomingBody:
    """An incomplete body of at most `limit` bytes.

    If all incomplete bodies exceed `MAX_ARRIVING`, the one that has waited longest for its next part is discarded.
    """

    _incomplete: ClassVar[WeakSet[IncomingBody]] = WeakSet()

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts = bytearray()
        self._last = time.monotonic()
        self._is_discarded = False

    def add(self, part: bytes) -> None:
        """Append a part. Raises `OverflowError` if the body is too large, `BufferError` if it was discarded."""
        if len(self._parts) + len(part) > self._limit:
            raise OverflowError(f"it has more than {self._limit} bytes")
        self._last = time.monotonic()
        self._incomplete.add(self)
        while sum(len(body._parts) for body in self._incomplete) + len(part) > MAX_ARRIVING:
            min(self._incomplete, key=lambda body: body._last)._discard()
        if self._is_discarded:
            raise BufferError("too much arrives at once")
        self._parts += part

    def join(self) -> bytes:
        """Return the complete body."""
        self._incomplete.discard(self)
        return bytes(self._parts)

    def _discard(self) -> None:
        self._is_discarded, self._parts = True, bytearray()
        self._incomplete.discard(self)


def parse(model: type[M], body: bytes) -> M:
    """The body as a `model`. Raises a 422 `Problem`."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise invalid(error, "the body") from None


def invalid(error: ValidationError, subject: str) -> Problem:
    """The 422 `Problem` of a validation error: its first invalid field, or `subject` if there is no field."""
    item = main_error(error)
    location = ".".join(str(part) for part in item["loc"]) or subject
    detail = f"{location}: {item['msg'].lower()}".encode("utf-8", "replace").decode()
    return Problem(422, "invalid-request", detail)


# ---------------------------------------------------------------------------------------------------------
# Errors


def to_problem(error: Exception, method: str, target: str) -> Problem:
    """Convert any exception to a problem; a defect of the server is logged."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, web.HTTPException):  # aiohttp's own: no such route or method, body too large
        return Problem(error.status, "invalid-request", f"{error.status} {error.reason.lower()}")
    logger.error("%s %s", method, target, exc_info=error)
    return Problem(500, "internal-error", "a defect of the server; its log has more")


def problem_response(problem: Problem, request: web.BaseRequest | None = None) -> web.Response:
    """The HTTP response of a problem; `request` is None for an unreadable one."""
    headers = {"Server": SERVER, **problem.headers}
    content, content_type = problem.content, problem.content_type
    response = web.Response(body=content, status=problem.status, content_type=content_type, headers=headers)
    if request is None or not request.content.is_eof():  # the rest of the body is not read
        response.force_close()
    return response


# ---------------------------------------------------------------------------------------------------------
# Connections


class Connections(web.Server):
    """Passes every request of every connection to `answer`. Its exceptions are answered as problems, and passed to
    `on_problem`."""

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        on_problem: Callable[[Problem], None] = lambda problem: None,
    ) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await answer(request)
            except Exception as error:
                problem = to_problem(error, request.method, request.rel_url.raw_path)
            on_problem(problem)
            return problem_response(problem, request)

        super().__init__(handle)

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=self._loop,
            access_log=None,  # type: ignore[arg-type]  # None means no access log
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # compressed bodies would grow in memory
        )


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        # A malformed request may hold a token: neither log nor answer quotes it.
        logger.debug("a malformed request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        if status >= 500:
            logger.error("a defect of the server", exc_info=exc)
            problem = Problem(500, "internal-error", "a defect of the server; its log has more")
        else:
            problem = Problem(400, "invalid-request", "this is not a well-formed HTTP/1.1 request")
        return problem_response(problem)
