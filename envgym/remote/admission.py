"""Turns a request, or a message of a channel, into a checked call: its route, client, query and body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from yarl import URL

from envgym.net.problems import Problem
from envgym.net.server import MAX_BODY, authenticate, invalid, parse, read_json
from envgym.net.tokens import ANYONE, ServerClient, Tokens

from .routes import Route, match


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The server's limits. Those of single clients are in the token file."""

    max_sessions: int = 10_000
    """Maximum of open sessions. Opening one more is answered with 429."""
    lease_seconds: float = 60.0
    """After this long without a request or a heartbeat a session is closed: its client is gone. An environment at
    work does not count as idle."""
    call_seconds: float = 600.0
    """Time limit for an environment to answer one reset, to read one page of tasks or to score one group. The
    limit of a step is the environment's own (`call_timeout`)."""
    body_seconds: float = 60.0
    """Time limit for a request's body to arrive."""
    max_body: int = MAX_BODY
    """Bytes of the largest body."""
    drain_seconds: float = 20.0
    """Time for which sessions may continue once the server is asked to stop."""


@dataclass(slots=True)
class Call:
    """One admitted request: its client, the values in its path, its query and body (parsed and raw), and over HTTP the
    request itself."""

    client: ServerClient
    values: list[str]
    query: Any = None
    body: Any = None
    raw: bytes = b""
    request: web.BaseRequest | None = None


async def call_of_request(request: web.BaseRequest, limits: ServerLimits, tokens: Tokens | None) -> tuple[Route, Call]:
    """The route and the call of a request. Without `tokens` every program of this machine is admitted. Raises a
    `Problem` for a request that is malformed or not allowed."""
    try:
        route, values = match(request.rel_url.raw_path, "GET" if request.method == "HEAD" else request.method)
    except Problem:
        authenticate(request, tokens)  # a client without a token must not learn which paths exist
        raise
    client = ANYONE if route.open and tokens is not None else authenticate(request, tokens)
    body = b"" if route.body is None else await read_json(request, limits.max_body, limits.body_seconds)
    return route, _call(route, Call(client, values, raw=body, request=request), request.rel_url)


def call_of_message(
    client: ServerClient, method: str, target: str, body: bytes, limits: ServerLimits
) -> tuple[Route, Call]:
    """The route and the call of a request over a channel, of an admitted client. Raises a `Problem` as
    `call_of_request` does. `target` is a path with its query."""
    if len(body) > limits.max_body:
        raise Problem(413, "too-large", f"a body has at most {limits.max_body} bytes")
    path, _, query = target.partition("?")
    route, values = match(path, method)
    return route, _call(route, Call(client, values, raw=body), URL.build(query_string=query, encoded=True))


def _call(route: Route, call: Call, url: URL) -> Call:
    """The call with its query and its body parsed. Raises a `Problem` if they are invalid."""
    if route.query is not None:
        if len(url.query) > len(set(url.query)):
            raise Problem(422, "invalid-request", "a parameter of the query comes twice")
        try:
            call.query = route.query.model_validate_strings(dict(url.query))
        except ValidationError as error:
            raise invalid(error, "the query") from None
    if route.body is not None:
        call.body = parse(route.body, call.raw)
    return call
