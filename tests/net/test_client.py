"""The client's exchanges: cookies of sessions, connections that are shared, and what came of a request."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import ClientSession, TCPConnector, web

from envgym.net import client
from envgym.net.client import NoAnswer, exchange, http_client


def test_cookies_are_a_sessions_own_and_kept_only_where_they_are_asked_for(serving):
    shown = []

    async def handler(request):
        shown.append(request.cookies.get("session"))
        answer = web.json_response({})
        answer.set_cookie("session", str(len(shown)))
        return answer

    async def main():
        pool = TCPConnector()
        async with serving(handler) as url:
            one, other, *others = [http_client(pool, keeps_cookies=number < 2) for number in range(4)]
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
    ],
)
def test_what_cannot_be_reached_is_tried_as_often_as_nothing_was_sent(monkeypatch, url, kind, says):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    tries, request = [], ClientSession.request

    def counted_request(self, method, url, **named):
        tries.append(url)
        return request(self, method, url, **named)

    monkeypatch.setattr(ClientSession, "request", counted_request)

    async def main():
        async with http_client() as http:
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

    async def main(handler, kind):
        async with serving(handler) as url, http_client() as http:
            with pytest.raises(NoAnswer) as failure:
                await exchange(http, "POST", url, b"{}", seconds=0.3, connects=3)
        assert failure.value.kind == kind

    asyncio.run(main(hangs_up, "lost"))
    asyncio.run(main(hangs, "timeout"))
    assert len(tries) == 2


def test_a_connection_that_the_server_has_just_closed_is_not_used(serving):
    sockets = []

    async def handler(request):
        sockets.append(request.transport.get_extra_info("socket"))
        return web.Response()

    async def main():
        async with serving(handler) as url, http_client() as http:
            for _ in range(2):
                await exchange(http, "POST", url, b"{}", seconds=5)
                sockets[-1].shutdown(socket.SHUT_RDWR)

    asyncio.run(main())
    assert len(sockets) == 2
