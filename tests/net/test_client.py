"""The client's exchanges: cookies of sessions, connections that are shared, and what came of a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter

import pytest
from aiohttp import web

from envgym.net import client
from envgym.net.client import HttpClient, JsonCaller, NoAnswer, exchange


def test_cookies_are_a_sessions_own_and_kept_only_where_they_are_asked_for(serving):
    shown = []

    async def handler(request):
        shown.append(request.cookies.get("session"))
        answer = web.json_response({})
        answer.set_cookie("session", str(len(shown)))
        return answer

    async def main():
        pool = HttpClient()
        async with serving(handler) as url:
            one, other, *others = [HttpClient(pool, keeps_cookies=number < 2) for number in range(4)]
            for asker in (one, other, one, other, *others):
                await exchange(asker, "GET", url, seconds=5)
            await pool.close()

    asyncio.run(main())
    assert shown == [None, None, "1", "2", None, None]


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("http://127.0.0.1:1/", "unreachable", r"cannot be reached \(connection refused\)"),
        ("http://nobody.invalid/", "unreachable", r"cannot be reached \(.+\)"),
        ("localhost:1", "url", "cannot be reached"),
        ("ftp://localhost/", "url", "cannot be reached"),
        ("http:///v1", "url", "cannot be reached"),
        ("http://localhost:port/", "url", "cannot be reached"),
    ],
)
def test_what_cannot_be_reached_is_tried_as_often_as_nothing_was_sent(monkeypatch, url, kind, says):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    tries, send = [], HttpClient.send

    def counted(self, method, url, body):
        tries.append(url)
        return send(self, method, url, body)

    monkeypatch.setattr(HttpClient, "send", counted)

    async def main():
        async with HttpClient() as http:
            with pytest.raises(NoAnswer, match=says) as failure:
                await exchange(http, "GET", url, seconds=5, connects=3)
            return failure.value.kind

    assert asyncio.run(main()) == kind
    assert len(tries) == (3 if kind == "unreachable" else 1)


def test_what_may_have_arrived_is_sent_once(serving):
    tries = []

    async def hangs_up(request):
        tries.append(request.path)
        request.transport.close()
        return web.Response()

    async def hangs(request):
        tries.append(request.path)
        await asyncio.sleep(30)

    async def main(handler, kind, seconds):
        async with serving(handler) as url, HttpClient() as http:
            with pytest.raises(NoAnswer) as failure:
                await exchange(http, "POST", url, b"{}", seconds=seconds, connects=3)
        assert failure.value.kind == kind

    asyncio.run(main(hangs_up, "lost", 60))
    asyncio.run(main(hangs, "timeout", 1))
    assert len(tries) == 2


def test_a_connection_that_the_server_has_just_closed_is_not_used(serving):
    sockets = []

    async def handler(request):
        sockets.append(request.transport.get_extra_info("socket"))
        return web.Response()

    async def main():
        async with serving(handler) as url, HttpClient() as http:
            for _ in range(2):
                await exchange(http, "POST", url, b"{}", seconds=5)
                sockets[-1].shutdown(socket.SHUT_RDWR)

    asyncio.run(main())
    assert len(sockets) == 2


@contextlib.asynccontextmanager
async def connections_of(handler, **settings):
    """URL of a server, and its open connections."""
    server = web.Server(handler, **settings)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/", lambda: len(server.connections)
    finally:
        await runner.cleanup()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of a server that has no event for it
            await asyncio.sleep(0.01)


def test_256_requests_at_once_are_answered_while_the_server_closes_their_connections(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    open_at_once = []

    async def handler(request):
        open_at_once.append(connections())
        await asyncio.sleep(0.01)
        return web.json_response(await request.json())

    async def main():
        nonlocal connections
        async with connections_of(handler, keepalive_timeout=0.3) as (url, connections):
            caller = JsonCaller("the server", Counter(), timeout=60, tries=5, concurrency=256)
            for turn in range(4):
                numbers = range(256 * turn, 256 * (turn + 1))
                assert await asyncio.gather(*(caller.post(url, number) for number in numbers)) == list(numbers)
                await until(lambda turn=turn: connections() <= 85 * turn)  # all, or some, or almost none closed
            await caller.close()
            return caller.counters

    connections = None
    assert asyncio.run(main())["failures"] == 0
    assert max(open_at_once) <= 2 * 256  # with those that the server has not yet seen closed


def test_idle_connections_are_closed_by_the_next_request_and_open_ones_used_again(monkeypatch):
    async def main(keepalive):
        monkeypatch.setattr(client, "KEEPALIVE", keepalive)
        both = asyncio.Barrier(2)

        async def handler(request):
            if await request.read():
                await both.wait()
            return web.Response()

        async with connections_of(handler) as (url, connections), HttpClient() as http:
            await asyncio.gather(*(exchange(http, "POST", url, b"{}", seconds=60) for _ in range(2)))
            await exchange(http, "POST", url, b"", seconds=60)
            if keepalive == 0:
                await until(lambda: connections() == 1)
            return connections()

    assert asyncio.run(main(0.0)) == 1
    assert asyncio.run(main(600.0)) == 2


@pytest.mark.parametrize(("variable", "value", "asked"), [("NO_PROXY", "", True), ("NO_PROXY", "api.invalid", False)])
def test_https_alone_goes_through_the_environments_proxy(monkeypatch, variable, value, asked):
    """Which is asked for a tunnel, and sees neither key nor request."""
    heard = []

    async def proxy(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def main():
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"127.0.0.1:{port}")
        for name in ("https_proxy", "http_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        async with server, HttpClient(secret="sk-secret") as http:
            for url in ("https://api.invalid/v1", "http://api.invalid/v1"):
                with pytest.raises(NoAnswer) as failure:
                    await exchange(http, "POST", url, b"question", seconds=60)
                assert failure.value.kind == "unreachable"

    asyncio.run(main())
    assert [line.split(b"\r\n")[0] for line in heard] == [b"CONNECT api.invalid:443 HTTP/1.1"] * asked
    assert b"secret" not in b"".join(heard)


def test_a_name_and_a_password_in_an_address_are_sent_and_a_header_that_cannot_be_is_refused(serving):
    heard = []

    async def handler(request):
        heard.append(request.headers.get("Authorization"))
        return web.Response()

    async def main():
        async with serving(handler) as url:
            async with HttpClient() as http:
                await exchange(http, "GET", url.replace("//", "//me:pass@"), seconds=60)
            async with HttpClient(secret="two\nlines") as http:
                with pytest.raises(NoAnswer) as failure:
                    await exchange(http, "GET", url, seconds=60)
        assert failure.value.kind == "url"
        assert "lines" not in str(failure.value)

    asyncio.run(main())
    assert heard == ["Basic bWU6cGFzcw=="]
