"""The WebSocket for many sessions: who gets one, what may be said over it, and what of it outlives it."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import json
import logging
import termios
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import envgym
from envgym.net.tokens import Tokens
from envgym.types import Action

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef00"


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens"
    file.touch(0o600)
    file.write_text(f"alice {ALICE}\nbob {BOB}\n")
    return Tokens.read(file)


def opening(session: str) -> dict[str, Any]:
    return {"session_id": session, "seed": 1}


def step(step_id: int, text: str) -> dict[str, Any]:
    return {"step_id": step_id, "action": {"text": text}}


async def refused(url: str, **headers: str) -> int:
    """The status with which the server answers who asks for a WebSocket."""
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
            await http.ws_connect(f"{url}/v1/channel", headers=headers)
        return raised.value.status


def test_who_may_not_send_requests_gets_no_channel(unruly, channel, tokens):
    async def main() -> None:
        async with unruly(tokens=tokens) as (url, _, _):
            assert await refused(url) == 401
            assert await refused(url, Authorization=f"Bearer {ALICE}x") == 401
            async with channel(url, ALICE) as asking:
                assert (await asking.ask("GET", "/v1/envs"))[0] == 200
        async with unruly() as (url, _, _):
            assert await refused(url, Origin="http://evil.example") == 403
            assert await refused(url, Host="evil.example") == 403
            async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/channel") as response:
                assert (response.status, response.headers["Upgrade"]) == (426, "websocket")
                assert response.content_type == "application/problem+json"

    asyncio.run(main())


def test_another_clients_session_does_not_exist_over_a_channel_either(unruly, channel, tokens):
    async def main() -> None:
        async with unruly(tokens=tokens) as (url, _, _), channel(url, ALICE) as alice, channel(url, BOB) as bob:
            assert (await alice.ask("POST", "/v1/sessions", opening("mine")))[0] == 200
            for session in ("mine", "none"):
                status, problem = await bob.ask("POST", f"/v1/sessions/{session}/step", step(0, "on"))
                assert (status, problem["type"]) == (404, "urn:envgym:problem:session-not-found")
            beat = {"session_ids": ["mine"]}
            assert await bob.ask("POST", "/v1/sessions/heartbeat", beat) == (200, {"alive": []})
            assert (await bob.ask("DELETE", "/v1/sessions/mine"))[0] == 204
            assert (await alice.ask("POST", "/v1/sessions/mine/step", step(0, "on")))[1]["info"] == {"steps": 1}

    asyncio.run(main())


def test_each_request_is_answered_when_it_is_done_and_as_it_is_over_http(unruly, channel):
    async def main() -> None:
        async with unruly() as (url, _, _), channel(url) as asking:
            for session in ("slow", "fast", "left"):
                assert (await asking.ask("POST", "/v1/sessions", opening(session)))[0] == 200
            left = await asking.send("POST", "/v1/sessions/left/step", step(0, "take 60"))
            slow = await asking.send("POST", "/v1/sessions/slow/step", step(0, "take 0.3"))
            fast = await asking.send("POST", "/v1/sessions/fast/step", step(0, "on"))
            assert [(await asking.hear())[:2] for _ in range(2)] == [(fast, 200), (slow, 200)]
            closing = await asking.send("DELETE", "/v1/sessions/left")
            assert {(await asking.hear())[:2] for _ in range(2)} == {(left, 404), (closing, 204)}
            for method, target, body, status in (
                ("GET", "/v1/envs/game/tasks?split=train&count=0", None, 422),
                ("GET", "/v1/envs/game/tasks?split=train&count=1", None, 200),
                ("POST", "/v1/sessions", {"session_id": "/"}, 422),
                ("DELETE", "/livez", None, 405),
                ("GET", "/nothing", None, 404),
                ("GET", "/v1/channel", None, 426),
            ):
                assert (await asking.ask(method, target, body))[0] == status, target

    asyncio.run(main())


def test_who_says_what_is_no_request_is_heard_no_longer_and_nobody_else_notices(unruly, channel, caplog):
    nonsense = [
        "a text",
        '[[0,"GET","/livez",0]]\n',
        b"",
        b"no heads",
        b"{}\n",
        b'[[0,"GET","/livez",4]]more',
        b'[[0,"GET","/livez",0]]\nmore',
        b'[[0,"GET","/livez",-1],[1,"GET","/livez",1]]\n',
        b'[[0,"GET","/livez",9000000000000000000]]\n',
        b'[[0,"PUT","/livez",0]]\n',
        b'[["0","GET","/livez",0]]\n',
        b"[" * 100_000,
        b"\xff" * 1000,
        b'[[0,"GET","/livez",%d]]\n' % 2**21 + b" " * 2**21,
    ]

    async def main() -> None:
        async with unruly() as (url, _, _), channel(url) as good, aiohttp.ClientSession() as http:
            assert (await good.ask("POST", "/v1/sessions", opening("s")))[0] == 200
            for number, message in enumerate(nonsense):
                async with http.ws_connect(f"{url}/v1/channel") as bad, asyncio.timeout(5):
                    await (bad.send_str(message) if isinstance(message, str) else bad.send_bytes(message))
                    heard = await bad.receive()
                    assert heard.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message[:50]
                status, stepped = await good.ask("POST", "/v1/sessions/s/step", step(number, "on"))
                assert (status, stepped["info"]) == (200, {"steps": number + 1})

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []  # no defect of the server


@pytest.mark.parametrize("again", ["a new channel", "http"])
def test_a_step_is_taken_once_though_its_client_lost_the_connection_meanwhile(unruly, channel, again):
    async def main() -> None:
        async with unruly() as (url, _, spec):
            async with channel(url) as asking:
                assert (await asking.ask("POST", "/v1/sessions", opening("s")))[0] == 200
                await asking.send("POST", "/v1/sessions/s/step", step(0, "take 0.4"))
                async with asyncio.timeout(30):
                    while not spec.long_steps:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                asking.socket._response.connection.transport.abort()
            async with channel(url) as asking, aiohttp.ClientSession() as http:
                if again == "http":
                    async with http.post(f"{url}/v1/sessions/s/step", json=step(0, "take 0.4")) as response:
                        stepped = await response.json()
                else:
                    _, stepped = await asking.ask("POST", "/v1/sessions/s/step", step(0, "take 0.4"))
                assert stepped["info"] == {"steps": 1}
                assert (await asking.ask("POST", "/v1/sessions/s/step", step(1, "on")))[1]["info"] == {"steps": 2}

    asyncio.run(main())


@pytest.mark.parametrize(("limit", "value"), [("MAX_REQUESTS", 100), ("MAX_UNSENT", 2**20)])
def test_a_client_that_takes_no_answers_is_read_no_further_and_holds_up_nobody(
    unruly, channel, monkeypatch, limit, value
):
    monkeypatch.setattr(f"envgym.remote.channel.{limit}", value)
    requests = 3000

    async def main() -> None:
        async with unruly() as (url, _, _), channel(url) as asking, channel(url) as other:
            for each, session in ((asking, "s"), (other, "t")):
                assert (await each.ask("POST", "/v1/sessions", opening(session)))[0] == 200
            body = step(0, "x" * 10_000)
            _, stepped = await asking.ask("POST", "/v1/sessions/s/step", body)

            sent = 0

            async def ask_on() -> None:
                nonlocal sent
                for _ in range(requests):
                    await asking.send("POST", "/v1/sessions/s/step", body)
                    sent += 1

            sending = asyncio.create_task(ask_on())
            counts = [-1] * 20
            for number in range(1000):
                assert (await other.ask("POST", "/v1/sessions/t/step", step(number, "on")))[0] == 200
                counts = [*counts[1:], sent]
                if counts[0] == sent:
                    break  # it gets no further
                await asyncio.sleep(0.01)
            assert not sending.done()  # all that waits would be in the server's memory
            for _ in range(requests):
                assert (await asking.hear())[2] == stepped
            await sending

    asyncio.run(main())


def test_an_answer_that_is_too_large_for_a_channel_is_had_over_http_and_its_step_is_taken_once(start, channel):
    server = start("patient.py:PatientSpec")
    large = step(0, "x" * 300_000)

    async def main() -> None:
        async with channel(server.url) as asking, aiohttp.ClientSession() as http:
            assert (await asking.ask("POST", "/v1/sessions", opening("s")))[0] == 200
            number = await asking.send("POST", "/v1/sessions/s/step", large)
            assert json.loads((await asking.socket.receive_bytes()).strip()) == [[number, 413, "", 0]]
            async with http.post(f"{server.url}/v1/sessions/s/step", json=large) as response:
                assert (await response.json())["info"] == {"steps": 1}
        async with envgym.make(server.url) as env:
            await env.reset(seed=1)
            for text in ("x" * 300_000, "x", "\n" * 200_000):
                observation, *_ = await env.step(Action(text))
                assert observation.text == text

    asyncio.run(main())


def test_bodies_that_are_not_whole_are_bounded_together(unruly, monkeypatch):
    """The one that has stood still the longest is given up: whoever goes on sending is answered."""
    monkeypatch.setattr("envgym.net.server.MAX_ARRIVING", 2**20)

    async def main() -> None:
        async with unruly() as (url, _, _):
            port = int(url.rpartition(":")[2])

            async def begun(size: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode() + sent)
                await asyncio.sleep(0.05)
                return reader, writer

            idle = [await begun(2**18 + 1, b" " * 2**18) for _ in range(6)]
            body = json.dumps(opening("s")).encode()
            reader, writer = await begun(len(body), body[:10])
            writer.write(body[10:])
            assert b"200" in await reader.readline()
            idle[0][1].write(b" ")
            assert b"429" in await idle[0][0].readline()
            slow, its = await begun(2**22, b" " * 2**21)
            assert b"429" in await slow.readline()  # more by itself than all may have together
            for _, each in [*idle, (reader, writer), (slow, its)]:
                each.close()

    asyncio.run(main())


async def fill(asking: Any) -> None:
    """Leave so much to be read that the server cannot send all of it."""
    assert (await asking.ask("POST", "/v1/sessions", opening("s")))[0] == 200
    for _ in range(2000):
        await asking.send("POST", "/v1/sessions/s/step", step(0, "on"))
    waiting = list(range(-10, 0))
    async with asyncio.timeout(60):
        while waiting[0] != waiting[-1]:  # until nothing more is taken
            await asyncio.sleep(0.02)
            waiting = [*waiting[1:], unread(asking)]


def unread(asking: Any) -> int:
    """Bytes that wait for their reader here, as the kernel has it; 0 where the server has closed the connection."""
    size = array.array("i", [0])
    if connection := asking.socket.get_extra_info("socket"):
        fcntl.ioctl(connection.fileno(), termios.FIONREAD, size)
    return size[0]


@pytest.mark.parametrize("then", ["it says nonsense", "it is silent"])
def test_nothing_is_kept_for_a_client_that_reads_nothing_any_more(unruly, channel, monkeypatch, then):
    monkeypatch.setattr("envgym.remote.channel.CLOSE_SECONDS", 0.2)
    if then == "it is silent":
        monkeypatch.setattr("envgym.remote.channel.MAX_REQUESTS", 100)
        monkeypatch.setattr("envgym.remote.channel.PING_SECONDS", 0.2)

    package = f"{Path(envgym.__file__).parent}/"

    async def main() -> None:
        async with unruly() as (url, _, _):
            before = asyncio.all_tasks()
            async with channel(url) as asking:
                await fill(asking)
                if then == "it says nonsense":
                    await asking.socket.send_str("a text")
                for _ in range(3000):
                    left = [task.get_coro().cr_code.co_filename for task in asyncio.all_tasks() - before]
                    if not any(file.startswith(package) for file in left):
                        return
                    await asyncio.sleep(0.02)
                raise AssertionError(left)

    asyncio.run(main())


def test_a_client_that_reads_nothing_any_more_does_not_keep_the_server_from_ending(unruly, channel, monkeypatch):
    monkeypatch.setattr("envgym.remote.channel.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("envgym.remote.application.SHUTDOWN_SECONDS", 1000)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as clients, asyncio.timeout(60), unruly() as (url, _, _):
            await fill(await clients.enter_async_context(channel(url)))

    asyncio.run(main())
