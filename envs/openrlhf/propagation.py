"""Propagation of the current episode over HTTP requests within this process.

A file may serve the engine to a program of its own: its `execute` then asks by HTTP, and `llm_engine.generate` is
called by a server in another thread, which has another context (a `ContextVar` is not carried over). So requests to
this machine get a header with the episode's id, which servers here read, whichever library makes them: distributed
tracing finds its spans in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import importlib
from collections.abc import Mapping
from typing import Any

from .llm_engine import current, runs

HEADER = "x-envgym-episode"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def install() -> None:
    """Patch the clients and servers of the libraries that are installed, in this process."""
    for patch in (_patch_standard_library, _patch_starlette, _patch_aiohttp, _patch_httpx):
        with contextlib.suppress(ImportError):
            patch()
    with contextlib.suppress(ImportError):
        _patch_httpx("httpx2")  # its name in newer versions of the `openai` library


def _header(host: str | None) -> dict[str, str]:
    """The header for a request to `host`. There is none for other machines."""
    run = current.get(None)
    return {HEADER: run.id} if run is not None and host in LOOPBACK else {}


def _enter(headers: Mapping[str, str] | Any) -> None:
    """Make the episode in the header the context's, or none."""
    current.set(runs.get(headers.get(HEADER) or ""))


def _patch_standard_library() -> None:
    """`http.client`, which urllib and requests are made of; `http.server`, whose handlers each have a thread."""
    put, parse = http.client.HTTPConnection.putrequest, http.server.BaseHTTPRequestHandler.parse_request

    @functools.wraps(put)
    def putrequest(self: http.client.HTTPConnection, *args: Any, **kwargs: Any) -> None:
        put(self, *args, **kwargs)
        for name, value in _header(self.host).items():
            self.putheader(name, value)

    @functools.wraps(parse)
    def parse_request(self: http.server.BaseHTTPRequestHandler) -> bool:
        parsed = parse(self)
        if parsed:
            _enter(self.headers)
        return parsed

    http.client.HTTPConnection.putrequest = putrequest  # type: ignore[method-assign]
    http.server.BaseHTTPRequestHandler.parse_request = parse_request  # type: ignore[method-assign]


def _patch_httpx(name: str = "httpx") -> None:
    httpx = importlib.import_module(name)

    def patched(send: Any) -> Any:
        @functools.wraps(send)
        def send_with_header(self: Any, request: Any, **kwargs: Any) -> Any:
            request.headers.update(_header(request.url.host))
            return send(self, request, **kwargs)

        return send_with_header

    for client in (httpx.Client, httpx.AsyncClient):
        client.send = patched(client.send)


def _patch_starlette() -> None:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers

    call = Starlette.__call__

    @functools.wraps(call)
    async def call_in_episode(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _enter(Headers(scope=scope))
        await call(self, scope, receive, send)

    Starlette.__call__ = call_in_episode  # type: ignore[method-assign]


def _patch_aiohttp() -> None:
    from aiohttp import ClientSession, web
    from multidict import CIMultiDict
    from yarl import URL

    request, handle = ClientSession._request, web.Application._handle

    @functools.wraps(request)
    async def request_with_header(self: Any, method: str, url: Any, *, headers: Any = None, **kwargs: Any) -> Any:
        base = getattr(self, "_base_url", None)
        header = _header((base.join(URL(url)) if base else URL(url)).host)
        headers = CIMultiDict(headers or (), **header) if header else headers
        return await request(self, method, url, headers=headers, **kwargs)

    @functools.wraps(handle)
    async def handle_in_episode(self: Any, incoming: web.Request) -> web.StreamResponse:
        _enter(incoming.headers)
        return await handle(self, incoming)

    ClientSession._request = request_with_header  # type: ignore[assignment, method-assign]
    web.Application._handle = handle_in_episode  # type: ignore[assignment, method-assign]
