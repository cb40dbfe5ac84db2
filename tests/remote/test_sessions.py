"""What environments do to their server: it answers each client for it, and serves the others as before."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

import envgym.registry as registry
from envgym.episodes.record import to_record
from envgym.errors import CallTimeout
from envgym.remote.admission import ServerLimits
from envgym.remote.wire import GroupToScore
from envgym.types import Action, Episode, Outcome, Task

Ask = Callable[..., Awaitable[tuple[int, Any]]]
UNRULY = "unruly.py:UnrulySpec"
FAULTS = [
    ("cancel a task of its own", "CancelledError"),
    ("exit", "SystemExit"),
    ("interrupt", "KeyboardInterrupt"),
    ("raise what has no words", "Nameless"),
]


async def ask(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.request(method, url + path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if "json" in response.content_type else text


def opening(session: str, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "seed": 1, **more}


def step(step_id: int, text: str) -> dict[str, Any]:
    return {"step_id": step_id, "action": {"text": text}}


def group(task_id: str = "t") -> dict[str, Any]:
    record = to_record(Episode("e", Task(task_id), Outcome.finish(), reward=1.0))
    return {"task": {"id": task_id}, "episodes": [record]}


async def until_closed(url: str, by: str, count: int) -> None:
    """Wait until so many sessions were closed for a reason."""
    line = f'envgym_sessions_closed_total{{by="{by}",env="game"}} {count:.1f}'
    for _ in range(3000):
        if line in (await ask(url, "GET", "/metrics"))[1]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(line)


# ---------------------------------------------------------------------------------------------------------
# What an environment raises


def test_whatever_an_environment_raises_is_its_clients_to_know_and_the_server_lives_on(start, channel):
    server = start(UNRULY, "close=cancel a task of its own")

    async def play(asked: Ask) -> None:
        for how, kind in [*FAULTS, ("cancel itself", "CancelledError")]:
            status, problem = await asked("POST", "/v1/sessions", opening("bad", options={"reset": how}))
            assert (status, problem["error"]) == (422, kind)
            assert (await asked("POST", "/v1/sessions", opening("good")))[0] == 200
            for number in range(2):
                status, problem = await asked("POST", "/v1/sessions/good/step", step(number, how))
                assert (status, problem["error"]) == (422, kind)
                # Asked again it is the same answer, and no other step.
                assert await asked("POST", "/v1/sessions/good/step", step(number, how)) == (status, problem)
            status, stepped = await asked("POST", "/v1/sessions/good/step", step(2, "on"))
            assert (status, stepped["info"]) == (200, {"steps": 3})
            for session in ("bad", "good"):
                assert (await asked("DELETE", f"/v1/sessions/{session}"))[0] == 204
        assert 'envgym_sessions{env="game"} 0.0' in (await ask(server.url, "GET", "/metrics"))[1]

    async def main() -> None:
        async with channel(server.url) as asking, asyncio.timeout(60):
            await play(partial(ask, server.url))
            await play(asking.ask)
            assert (await asking.ask("POST", "/v1/sessions", opening("last")))[0] == 200  # closed as the server ends

    asyncio.run(main())
    assert server.stop() == 0
    assert "a defect of the server" not in server.log()


@pytest.mark.parametrize(("how", "kind"), FAULTS)
def test_what_tasks_and_judges_raise_is_no_end_of_the_server_either(unruly, channel, how, kind):
    async def main() -> None:
        async with (
            unruly(page=how, judge=how, describe=how) as (url, _, _),
            channel(url) as asking,
            asyncio.timeout(10),
        ):
            for asked in (
                ("GET", "/v1/envs/game/tasks?split=train&count=1", None),
                ("POST", "/v1/envs/game/score_group", group()),
            ):
                for _ in range(2):
                    for status, problem in (await ask(url, *asked), await asking.ask(*asked)):
                        assert (status, problem["error"]) == (422, kind)
            status, said = await ask(url, "GET", "/v1/envs/game")
            assert (status, said["splits"]["train"]["size"]) == (200, 1)
            split = {"exit": "SystemExit: 3", "raise what has no words": "Nameless: a Nameless that cannot be printed"}
            assert said["splits"]["test"]["error"] == split.get(how)

    asyncio.run(main())


def test_the_reaper_outlives_what_environments_raise_when_they_are_closed(unruly):
    async def main(how: str) -> None:
        async with unruly(ServerLimits(lease_seconds=0.1), close=how) as (url, application, _):
            for number in (1, 2):  # the second finds the reaper at work still
                assert (await ask(url, "POST", "/v1/sessions", opening(f"s{number}")))[0] == 200
                await until_closed(url, "lease", number)
            assert (await ask(url, "POST", "/v1/sessions", opening("s3")))[0] == 200
            async with asyncio.timeout(5):
                assert (await ask(url, "DELETE", "/v1/sessions/s3"))[0] == 204
            assert (await ask(url, "POST", "/v1/sessions", opening("s4")))[0] == 200
        assert len(application.sessions) == 0

    for how in ("cancel a task of its own", "cancel itself", "exit", "interrupt", "raise what has no words"):
        asyncio.run(main(how))


def test_what_json_cannot_carry_in_info_is_left_out_and_named(unruly):
    async def main() -> None:
        async with unruly() as (url, _, _), registry.spec(url) as spec:
            env = spec.make()
            await env.reset(seed=0)
            *_, info = await env.step(Action("info"))
            assert info["far down"] == {}
            assert info["fine"]["a"] == [1, "é", None]
            assert set(info) == {"far down", "fine"}
            await ask(url, "POST", "/v1/sessions", opening("s"))
            _, stepped = await ask(url, "POST", "/v1/sessions/s/step", step(0, "info"))
            assert stepped["dropped"] == [
                "surrogate",
                "long number",
                "within itself",
                "sparse",
                "deep",
                "far down.list",
            ]
            await env.close()

    asyncio.run(main())


def test_a_record_that_cannot_be_read_is_refused_in_words(unruly):
    async def main() -> None:
        async with unruly() as (url, _, spec):
            body = group()
            call = {"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}
            body["episodes"][0]["messages"] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
            status, problem = await ask(url, "POST", "/v1/envs/game/score_group", body)
            assert (status, problem["type"]) == (422, "urn:envgym:problem:invalid-request")
            assert problem["detail"].startswith("episodes.0: not an episode's record (RecursionError")
            assert spec.judged == 0

    asyncio.run(main())


def test_a_group_is_judged_once_however_many_are_judged_at_once(unruly):
    groups = 300

    async def main() -> None:
        async with unruly(judge_seconds=0.2) as (_, application, spec):
            hosted = application.sessions.environment("game")

            async def judged(number: int) -> bytes:
                asked = group(f"t{number}")
                return await hosted.score_group(
                    "anyone", GroupToScore.model_validate(asked), json.dumps(asked).encode()
                )

            first, *_, again = await asyncio.gather(*map(judged, range(groups)), judged(0))
            assert first == again
            assert spec.judged == groups

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# Time and room


def test_a_server_that_stood_still_reads_the_heartbeats_that_wait_before_it_closes_sessions(start, channel):
    server = start(UNRULY, "limit.lease_seconds=0.6")

    async def main() -> None:
        async with aiohttp.ClientSession() as http, channel(server.url) as asking:
            for number in range(3):
                assert (await ask(server.url, "POST", "/v1/sessions", opening(f"s{number}")))[0] == 200
            async with http.get(f"{server.url}/livez"):
                pass  # a connection, over which the next request is sent though nobody reads it
            server.process.send_signal(signal.SIGSTOP)
            await asking.send("POST", "/v1/sessions/heartbeat", {"session_ids": ["s0"]})
            beat = asyncio.create_task(_post(http, f"{server.url}/v1/sessions/heartbeat", {"session_ids": ["s1"]}))
            await asyncio.sleep(0.9)
            server.process.send_signal(signal.SIGCONT)
            assert (await asking.hear())[2] == {"alive": ["s0"]}
            assert await beat == {"alive": ["s1"]}
            await until_closed(server.url, "lease", 1)
            assert (await ask(server.url, "POST", "/v1/sessions/s0/step", step(0, "on")))[0] == 200

    asyncio.run(main())


async def _post(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with http.post(url, json=body) as response:
        return await response.json()


def test_a_lease_begins_anew_when_the_environment_has_answered(unruly, monkeypatch):
    """By a clock of the test's: environments work for two leases, and two thirds of one pass after each answer."""
    now = 0.0
    monkeypatch.setattr("envgym.remote.sessions.time", SimpleNamespace(monotonic=lambda: now))

    async def main() -> None:
        nonlocal now
        async with unruly(ServerLimits(lease_seconds=3.0), reset_seconds=0.1) as (url, application, spec):
            for path, body, at_work in (
                ("", opening("s"), lambda: spec.instances),
                ("/s/step", step(0, "take 0.1"), lambda: spec.long_steps),
            ):
                answering = asyncio.create_task(ask(url, "POST", f"/v1/sessions{path}", body))
                async with asyncio.timeout(30):
                    while not at_work():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                now += 6.0
                assert (await answering)[0] == 200
                now += 2.0
                await application.sessions.close_expired()
            assert (await ask(url, "DELETE", "/v1/sessions/s"))[0] == 204
            assert '{by="client",env="game"} 1.0' in (await ask(url, "GET", "/metrics"))[1]

    asyncio.run(main())


def test_an_environment_that_is_still_closing_takes_its_place(unruly):
    async def main() -> None:
        async with unruly(ServerLimits(max_sessions=1), close_seconds=0.3) as (url, _, spec):
            for number in range(3):
                statuses = []
                while 200 not in statuses:
                    statuses.append((await ask(url, "POST", "/v1/sessions", opening(f"s{number}")))[0])
                    await asyncio.sleep(0.01)
                assert set(statuses) == ({200, 429} if number else {200})
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await ask(url, "DELETE", f"/v1/sessions/s{number}")
            assert spec.most_instances == 1

    asyncio.run(main())


def test_no_step_is_taken_while_the_environment_is_at_work(unruly):
    """Neither the first while it is reset nor the next one while a step is taken."""

    async def main() -> None:
        async with unruly() as (url, _, spec), asyncio.timeout(30):
            for path, body, early in (
                ("/v1/sessions", opening("s", options={"reset": "hold"}), step(0, "on")),
                ("/v1/sessions/s/step", step(0, "hold"), step(1, "on")),
            ):
                spec.held, spec.free = asyncio.Event(), asyncio.Event()
                working = asyncio.create_task(ask(url, "POST", path, body))
                await spec.held.wait()
                status, problem = await ask(url, "POST", "/v1/sessions/s/step", early)
                assert (status, problem["type"]) == (409, "urn:envgym:problem:step-conflict")
                spec.free.set()
                assert (await working)[0] == 200
            assert (await ask(url, "POST", "/v1/sessions/s/step", step(1, "on")))[1]["info"] == {"steps": 2}

    asyncio.run(main())


def test_an_environment_that_takes_longer_than_the_servers_limit_is_a_504(unruly):
    async def main() -> None:
        async with unruly(ServerLimits(call_seconds=0.1), reset_seconds=60, judge_seconds=60, page="wait") as (
            url,
            _,
            _,
        ):
            for method, path, body in (
                ("POST", "/v1/sessions", opening("s", task={"id": "t"})),
                ("POST", "/v1/envs/game/score_group", group()),
                ("GET", "/v1/envs/game/tasks?split=train&count=1", None),
            ):
                status, problem = await ask(url, method, path, body)
                assert (status, problem["type"]) == (504, "urn:envgym:problem:environment-timeout")
                assert "no answer within 0.1 s" in problem["detail"]

    asyncio.run(main())


def test_a_step_or_reset_beyond_the_environments_own_limit_is_what_it_is_locally(unruly):
    async def main() -> None:
        async with unruly(call_timeout=0.2) as (url, _, local), registry.spec(url) as remote:
            for spec in (local, remote):
                env = spec.make()
                await env.reset(seed=0)
                with pytest.raises(CallTimeout):
                    await env.step(Action("take 60"))
                await env.close()
            for path, body in (("", opening("t", options={"reset": "wait"})), ("/s/step", step(0, "take 60"))):
                await ask(url, "POST", "/v1/sessions", opening("s"))
                status, problem = await ask(url, "POST", f"/v1/sessions{path}", body)
                assert (status, problem["error"]) == (422, "CallTimeout")

    asyncio.run(main())


def test_a_connection_on_which_no_whole_request_comes_is_closed(unruly, monkeypatch):
    monkeypatch.setattr("envgym.net.server.KEEPALIVE_SECONDS", 0.3)

    async def main() -> None:
        async with unruly() as (url, _, _), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", url.rpartition(":")[2])
            writer.write(b"GET /livez HTTP/1.1\r\nHost: local")
            assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("way", ["http", "channel"])
def test_a_server_that_is_asked_to_stop_answers_what_it_was_asked_before(unruly, channel, monkeypatch, way):
    monkeypatch.setattr("envgym.remote.application.SHUTDOWN_SECONDS", 0.05)  # draining alone is what waits

    async def main() -> None:
        async with contextlib.AsyncExitStack() as clients:
            limits = ServerLimits(drain_seconds=1000)
            async with unruly(limits, judge_seconds=0.3) as (url, application, spec), asyncio.timeout(60):
                asked: tuple[Any, ...] = ("POST", "/v1/envs/game/score_group", group())
                if way == "http":
                    judging = asyncio.create_task(ask(url, *asked))
                else:
                    asking = await clients.enter_async_context(channel(url))
                    judging = asyncio.create_task(asking.ask(*asked))
                for _ in range(10000):
                    if not spec.judged:
                        await asyncio.sleep(0.005)
                await application.drain()  # there is no session
            assert (await judging)[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize("way", ["http", "channel"])
def test_what_takes_longer_than_a_server_may_drain_does_not_hold_it_up(unruly, channel, way):
    """It would be answered if the server waited for it."""

    async def main() -> None:
        async with contextlib.AsyncExitStack() as clients:
            async with unruly(ServerLimits(drain_seconds=0.05), judge_seconds=6.0) as (url, application, spec):
                asked: tuple[Any, ...] = ("POST", "/v1/envs/game/score_group", group())
                if way == "http":
                    judging = asyncio.create_task(ask(url, *asked))
                else:
                    asking = await clients.enter_async_context(channel(url))
                    judging = asyncio.create_task(asking.ask(*asked))
                for _ in range(10000):
                    if not spec.judged:
                        await asyncio.sleep(0.005)
                await application.drain()
            with pytest.raises((aiohttp.ClientError, TypeError)):  # the connection ends without an answer
                await judging

    asyncio.run(main())


@pytest.mark.parametrize("way", ["http", "channel"])
def test_the_last_session_of_a_server_that_ends_is_closed_without_a_failure(start, monkeypatch, way):
    if way == "http":
        monkeypatch.setattr("envgym.remote.transport.Transport._channel", no_channel)
    server = start(UNRULY, "limit.drain_seconds=1000", "close_seconds=0.2")

    async def main() -> None:
        async with registry.spec(server.url, reconnect=1000) as spec:
            envs = [spec.make() for _ in range(3)]
            for env in envs:
                await env.reset(seed=0)
            server.process.terminate()
            while (await ask(server.url, "GET", "/readyz"))[0] != 503:  # until the signal has come through
                pass
            for env in envs:
                await env.step(Action("on"))
            async with asyncio.timeout(60):
                await asyncio.gather(*(env.close() for env in envs))
            assert (spec.counters.failures, spec.counters.retries) == (0, 0)

    asyncio.run(main())
    assert server.process.wait(60) == 0


async def no_channel(transport: object) -> None:
    """What a client has where a proxy before the server lets no WebSocket through."""
