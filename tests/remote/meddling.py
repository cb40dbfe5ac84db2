"""A proxy between client and server: it answers some requests itself, refuses WebSockets, or carries them badly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

Forward = Callable[[], Awaitable[web.Response]]
Meddle = Callable[[web.BaseRequest, Forward], Awaitable[web.StreamResponse]]
"""Answers a request: with what `forward` brings from the server, or in another way."""
Carry = Callable[[web.WebSocketResponse, aiohttp.ClientWebSocketResponse], Awaitable[None]]
"""Carries messages between the client's WebSocket and the server's. Both end when it does."""


async def forwarded(request: web.BaseRequest, forward: Forward) -> web.Response:
    return await forward()


def instead(response: web.Response, *ends: str, method: str = "") -> Meddle:
    """Requests whose path ends so get a copy of `response`."""

    async def meddle(request: web.BaseRequest, forward: Forward) -> web.Response:
        if not request.path.endswith(ends) or method not in ("", request.method):
            return await forward()
        return web.Response(body=response.body, status=response.status, headers=response.headers)

    return meddle


@contextlib.asynccontextmanager
async def meddling(url: str, meddle: Meddle = forwarded, carry: Carry | None = None) -> AsyncIterator[str]:
    """The proxy's URL. Without `carry` a request for a WebSocket is one like any other, and the server refuses it."""
    async with aiohttp.ClientSession(auto_decompress=False) as http:

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()

            async def forward() -> web.Response:
                kind = {"Content-Type": "application/json"} if body else {}
                async with http.request(request.method, url + request.path_qs, data=body or None, headers=kind) as got:
                    headers = {
                        name: got.headers[name] for name in ("Content-Type", "Retry-After") if name in got.headers
                    }
                    return web.Response(body=await got.read(), status=got.status, headers=headers)

            if carry is None or "Upgrade" not in request.headers:
                return await meddle(request, forward)
            client = web.WebSocketResponse(max_msg_size=0, timeout=0.1)
            await client.prepare(request)
            async with http.ws_connect(url + request.path_qs, max_msg_size=0) as server:
                await carry(client, server)
            if request.transport is not None:
                request.transport.abort()  # as a proxy that is killed does
            return client

        runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def both_ways(*ways: Awaitable[None]) -> None:
    """Until one of them ends."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    takes: Callable[[bytes], bytes | str | None] = bytes,
) -> None:
    """Carry messages as `takes` makes them, until it makes nothing of one."""
    async for message in source:
        sent = takes(message.data)
        if sent is None:
            return
        await (target.send_str(sent) if isinstance(sent, str) else target.send_bytes(sent))
