"""Repeated, lost and refused requests: no step is taken twice, and what cannot be mended is one clear error."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import envgym.registry as registry
from envgym.errors import ConfigError, EnvgymError, InvalidStep, ResetNeeded
from envgym.remote.server import serve
from envgym.remote.transport import RemoteError
from envgym.types import Action

GAME = Path(__file__).with_name("game.py")


async def exchange(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> tuple[int, Any]:
    async with session.request(method, url, json=body) as response:
        kind = response.content_type
        assert kind == ("application/json" if response.status == 200 else "application/problem+json")
        answer = await response.json(content_type=None)
        if response.status != 200:
            assert answer["status"] == response.status
        return response.status, answer


def test_a_repeated_request_gets_the_same_answer_and_is_not_carried_out_again(game):
    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            sessions = f"{game.url}/v1/sessions"
            opening = {"session_id": "abc", "seed": 1}
            opened = await exchange(http, "POST", sessions, opening)
            assert opened == await exchange(http, "POST", sessions, opening)
            assert opened[0] == 200
            status, problem = await exchange(http, "POST", sessions, opening | {"seed": 2})
            assert (status, problem["type"]) == (409, "urn:envgym:problem:session-conflict")

            step = {"step_id": 0, "action": {"text": "doze"}}
            answers = await asyncio.gather(*(exchange(http, "POST", f"{sessions}/abc/step", step) for _ in range(5)))
            answers.append(await exchange(http, "POST", f"{sessions}/abc/step", step))
            assert answers == answers[:1] * 6
            assert answers[0][1]["info"]["turns"] == 1
            for wrong in (step | {"action": {"text": "x"}}, step | {"step_id": 2}):
                status, problem = await exchange(http, "POST", f"{sessions}/abc/step", wrong)
                assert (status, problem["type"]) == (409, "urn:envgym:problem:step-conflict")
            _, second = await exchange(http, "POST", f"{sessions}/abc/step", step | {"step_id": 1})
            assert second["info"]["turns"] == 2
            status, _ = await exchange(http, "POST", f"{sessions}/abc/step", step)  # a straggler
            assert status == 409

            for _ in range(2):
                async with http.delete(f"{sessions}/abc") as response:
                    assert response.status == 204
            status, problem = await exchange(http, "POST", f"{sessions}/abc/step", step)
            assert (status, problem["type"]) == (404, "urn:envgym:problem:session-not-found")

    asyncio.run(main())


def test_answers_lost_on_the_way_are_asked_for_again_and_no_step_is_doubled(game, losing_proxy):
    async def main() -> None:
        async with losing_proxy(game.url, 3) as url, registry.spec(url) as spec:
            env = spec.make()
            for seed in range(5):
                await env.reset(seed=seed)
                turns = [(await env.step(Action("no")))[4]["turns"] for _ in range(4)]
                assert turns == [1, 2, 3, 4]
            await env.close()
            assert spec.counters.retries >= 5
            assert spec.counters.failures == 0

    asyncio.run(main())


def test_malformed_requests_are_problems(game):
    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            good = {"session_id": "m", "seed": 1}
            for method, path, body, expected in [
                ("GET", "/nothing", None, 404),
                ("GET", "/v1/sessions", None, 405),
                ("GET", "/v1/envs/game/tasks?split=train&start=x", None, 422),
                ("GET", "/v1/envs/game/tasks?split=dev", None, 422),
                ("GET", "/v1/envs/game/tasks?split=train&count=1001", None, 422),
                ("POST", "/v1/sessions", {"seed": 1}, 422),
                ("POST", "/v1/sessions", good | {"session_id": "../x"}, 422),
                ("POST", "/v1/sessions", good | {"task": {"prompt": 3}}, 422),
                ("POST", "/v1/sessions", [], 422),
            ]:
                status, problem = await exchange(http, method, game.url + path, body)
                assert status == expected, (path, body)
                assert problem["detail"]
            async with http.post(f"{game.url}/v1/sessions", data='{"session_id":"m","seed":1}') as response:
                assert response.status == 415  # what a web page could make a browser send
            assert await exchange(http, "GET", f"{game.url}/livez") == (200, {"status": "ok"})

    asyncio.run(main())


def test_an_environment_that_raises_fails_its_episode_and_the_server_lives_on(game):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            await env.reset(seed=0)
            with pytest.raises(RemoteError, match="the environment raised KeyError: 'no such card'") as raised:
                await env.step(Action("raise"))
            assert not raised.value.retryable
            with pytest.raises(InvalidStep, match="a reward must be finite"):
                await env.step(Action("bad reward"))
            with pytest.raises(RemoteError, match="RuntimeError: the dice are gone"):
                await env.reset(seed=0, options={"refuse": True})
            await env.reset(seed=0)
            assert (await env.step(Action("0")))[4]["turns"] == 1
            await env.close()

    asyncio.run(main())


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGKILL, 600), (signal.SIGSTOP, 2)])
def test_a_server_lost_in_mid_step_fails_the_episode_in_time(start, number, timeout):
    server = start("GuessSpec")

    async def main() -> None:
        async with registry.spec(server.url, timeout=timeout, reconnect=1) as spec:
            env = spec.make()
            await env.reset(seed=0)
            step = asyncio.create_task(env.step(Action("hang")))
            assert await asyncio.to_thread(server.line) == "hanging"
            server.process.send_signal(number)
            async with asyncio.timeout(10):
                with pytest.raises(RemoteError, match=server.url) as raised:
                    await step
            assert raised.value.retryable
            if number == signal.SIGKILL:
                async with asyncio.timeout(10):
                    await env.close()  # nobody is there to tell, and that is no error
            assert spec.counters.failures >= 1

    asyncio.run(main())
    server.process.kill()


def test_a_session_lost_with_a_restart_is_retryable(game):
    async def main() -> None:
        async with registry.spec(game.url) as spec:
            env = spec.make()
            await env.reset(seed=0)
            async with aiohttp.ClientSession() as http:
                await http.delete(f"{game.url}/v1/sessions/{env._session}")
            with pytest.raises(RemoteError, match="no session") as raised:
                await env.step(Action("0"))
            assert (raised.value.kind, raised.value.retryable) == ("session_lost", True)
            with pytest.raises(ResetNeeded):
                await env.step(Action("0"))
            await env.close()

    asyncio.run(main())


def test_giving_a_step_up_closes_its_session_on_the_server(start):
    server = start("GuessSpec")

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            env = spec.make()
            await env.reset(seed=0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await env.step(Action("hang"))
            await env.close()

    asyncio.run(main())
    assert [server.line(), server.line()] == ["hanging", "closed"]


# ---------------------------------------------------------------------------------------------------------
# Servers that are not there


async def failure(url: str, **settings: Any) -> str:
    with pytest.raises(EnvgymError) as raised:
        async with asyncio.timeout(20), registry.spec(url, **settings):
            pass
    assert "\n" not in str(raised.value)
    assert url in str(raised.value)
    return str(raised.value)


def test_a_server_that_is_not_there_is_one_clear_line(serving):
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    async def not_found(request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def newer(request: web.Request) -> web.Response:
        return web.json_response({"version": 99, "envs": [], "lease_seconds": 60, "max_sessions": 1})

    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        assert "connection refused" in await failure(f"http://127.0.0.1:{port}")
        assert "cannot be reached (" in await failure("http://nowhere.invalid:8000")
        assert "not a usable URL" in await failure("http://")
        async with serving(not_found) as url:
            assert "with 404 Not Found" in await failure(url)
        async with serving(page) as url:
            assert "not one of an envgym server" in await failure(url)
        async with serving(newer) as url:
            assert "speaks version 99" in await failure(url)
        async with serving(never) as url:
            assert "no answer within 0.5 s" in await failure(url, timeout=0.5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("0.0.0.0", "refusing to serve on 0.0.0.0 without tokens: .*--token-file"),
        ("::", "refusing to serve on ::"),
        ("", "refusing to serve on every address"),
        ("192.0.2.1", "refusing to serve on 192.0.2.1"),
        ("nowhere.invalid", "no such address"),
    ],
)
def test_only_loopback_addresses_are_served(host, reason):
    spec = registry.spec(f"{GAME}:GuessSpec")
    with pytest.raises(ConfigError, match=reason):
        asyncio.run(serve({"game": spec}, host, 0, on_ready=pytest.fail))


def test_a_port_that_is_taken_is_one_clear_line():
    spec = registry.spec(f"{GAME}:GuessSpec")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot serve on 127.0.0.1:{port}: address already in use; choose"):
            asyncio.run(serve({"game": spec}, "127.0.0.1", port, on_ready=pytest.fail))
