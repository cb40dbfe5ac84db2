"""A real HTTP server whose manners a test decides."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
def serving() -> Callable[[Handler], contextlib.AbstractAsyncContextManager[str]]:
    """`async with serving(handler) as url`: `handler` answers every request to `url`, whatever its path."""

    @contextlib.asynccontextmanager
    async def serving(handler: Handler) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            host, port = site._server.sockets[0].getsockname()[:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()

    return serving
