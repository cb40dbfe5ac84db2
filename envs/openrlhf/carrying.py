"""Carries which episode is being executed over HTTP requests within this process.

A file may serve the engine to a program of its own: its `execute` then asks by HTTP, and what calls
`llm_engine.generate` is a server in another thread, where Python knows nothing of the episode (a `ContextVar` stays
behind). So requests to this machine get a header that names it, which servers here read, whichever library makes them:
the way in which tracing finds its spans again.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .engine import current, runs

HEADER = "x-envgym-episode"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HTTPX = ("httpx", "httpx2")
"""One library, under the names that it has had; the `openai` library asks by it."""


def install() -> None:
    """Let clients and servers of the libraries that are installed carry it from now on, in this process."""
    _install_standard_library()
    libraries: list[Callable[[], None]] = [_install_starlette, _install_aiohttp]
    libraries += [partial(_install_httpx, name) for name in HTTPX]
    for install_in in libraries:
        with contextlib.suppress(ImportError):
            install_in()


def _told(host: str | None) -> dict[str, str]:
    """The header for a request to `host`. Other machines are told nothing."""
    run = current.get(None)
    return {HEADER: run.id} if run is not None and host in LOOPBACK else {}


def _hear(headers: Mapping[str, str] | Any) -> None:
    """Let what is done from here on in this context be the episode's that is named, or nobody's."""
    current.set(runs.get(headers.get(HEADER) or ""))


def _install_standard_library() -> None:
    """`http.client`, which urllib and requests are made of; `http.server`, whose handlers each have a thread."""
    put, parse = http.client.HTTPConnection.putrequest, http.server.BaseHTTPRequestHandler.parse_request

    @functools.wraps(put)
    def putrequest(self: http.client.HTTPConnection, *args: Any, **kwargs: Any) -> None:
        put(self, *args, **kwargs)
        for name, value in _told(self.host).items():
            self.putheader(name, value)

    @functools.wraps(parse)
    def parse_request(self: http.server.BaseHTTPRequestHandler) -> bool:
        parsed = parse(self)
        if parsed:
            _hear(self.headers)
        return parsed

    http.client.HTTPConnection.putrequest = putrequest  # type: ignore[method-assign]
    http.server.BaseHTTPRequestHandler.parse_request = parse_request  # type: ignore[method-assign]


def _install_httpx(name: str) -> None:
    httpx = importlib.import_module(name)

    def telling(send: Any) -> Any:
        @functools.wraps(send)
        def tell(self: Any, request: Any, **kwargs: Any) -> Any:
            request.headers.update(_told(request.url.host))
            return send(self, request, **kwargs)

        return tell

    for client in (httpx.Client, httpx.AsyncClient):
        client.send = telling(client.send)


def _install_starlette() -> None:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers

    call = Starlette.__call__

    @functools.wraps(call)
    async def hear(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _hear(Headers(scope=scope))
        await call(self, scope, receive, send)

    Starlette.__call__ = hear  # type: ignore[method-assign]


def _install_aiohttp() -> None:
    from aiohttp import ClientSession, web
    from multidict import CIMultiDict
    from yarl import URL

    request, handle = ClientSession._request, web.Application._handle

    @functools.wraps(request)
    async def tell(self: Any, method: str, url: Any, *, headers: Any = None, **kwargs: Any) -> Any:
        base = getattr(self, "_base_url", None)
        told = _told((base.join(URL(url)) if base else URL(url)).host)
        headers = CIMultiDict(headers or (), **told) if told else headers
        return await request(self, method, url, headers=headers, **kwargs)

    @functools.wraps(handle)
    async def hear(self: Any, asked: web.Request) -> web.StreamResponse:
        _hear(asked.headers)
        return await handle(self, asked)

    ClientSession._request = tell  # type: ignore[assignment, method-assign]
    web.Application._handle = hear  # type: ignore[assignment, method-assign]
