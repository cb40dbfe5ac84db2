"""From a request to a call: whose it is, whether it is let in, and what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError
from yarl import URL

from .arriving import Arriving
from .limits import Limits
from .listening import is_loopback
from .routes import Route, match
from .sessions import RETRY_SECONDS
from .tokens import ANYONE, Client, Tokens
from .wire import Problem


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
    """What a server lets in. Without `tokens` that is every program of this machine."""

    def __init__(self, limits: Limits, tokens: Tokens | None) -> None:
        self._limits = limits
        self._tokens = tokens

    async def of_request(self, request: web.BaseRequest) -> tuple[Route, Call]:
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
            raise MethodNotAllowed(routes)
        call = Call(client, values, request=request)
        if route.query is not None:
            call.query = _query(route.query, request.rel_url)
        if route.body is not None:
            call.raw = await self._read(request)
            call.body = _parse(route.body, call.raw)
        return route, call

    def of_message(self, client: Client, method: str, target: str, body: bytes) -> tuple[Route, Call]:
        """The route and the call of a request over a WebSocket, of a client that was let in. Raises a `Problem` as
        `of_request` does. `target` is a path with its query."""
        if len(body) > self._limits.max_body:
            raise Problem(413, "too-large", f"a body has at most {self._limits.max_body} bytes")
        path, _, query = target.partition("?")
        routes, values = match(path)
        route = routes.get(method)
        if route is None:
            raise MethodNotAllowed(routes)
        call = Call(client, values)
        if route.query is not None:
            call.query = _query(route.query, URL.build(query_string=query, encoded=True))
        if route.body is not None:
            call.raw, call.body = body, _parse(route.body, body)
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
            arriving = Arriving(limit)
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.content.iter_any():
                    arriving.add(part)
            return arriving.whole()
        except TimeoutError:
            detail = f"the body did not arrive within {self._limits.body_seconds:g} s"
            raise Problem(408, "too-slow", detail) from None
        except OverflowError:
            raise too_large from None
        except BufferError:
            detail = "too much arrives at once; send it again"
            raise Problem(429, "server-full", detail, retry_after=RETRY_SECONDS) from None
        except Exception as error:  # a broken chunk, a connection that ended: whatever it is, the sender's
            raise Problem(400, "invalid-request", f"the body cannot be read ({type(error).__name__})") from None


_NO_ROUTES: tuple[Mapping[str, Route], list[str]] = ({}, [])


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
