"""Several servers of one environment, some of them sick: each is used as long as it works, and again once it does."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

import envgym.registry as registry
from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.net.problems import Problem
from envgym.remote import replicas
from envgym.remote.transport import RemoteError
from envgym.remote.wire import EnvList
from envgym.types import Action, Episode, Outcome

from .meddling import instead, meddling
from .test_client_faults import all_played, counted, emptied, failures, roll

SICK = web.Response(status=500, text="<html>upstream error</html>", content_type="text/html")


@pytest.fixture(scope="module")
def ranked(new_server: Any) -> Iterator[Any]:
    server = new_server("RankedSpec")
    yield server
    assert server.stop() == 0


@pytest.fixture
def tried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.3)


def problem(status: int, kind: str) -> web.Response:
    body = Problem(status, kind, "so it is").body.model_dump_json()
    return web.Response(status=status, body=body, content_type="application/problem+json")


async def played_on(spec: EnvSpec) -> str:
    """Where the next episode is begun as the rollout does it: first a place, then the reset."""
    env = spec.make()
    try:
        await env.acquire()
        await env.reset(seed=1)
        return str(env._replica.address)
    finally:
        await env.close()


async def until_played_on(spec: EnvSpec, url: str) -> None:
    for _ in range(3000):
        if await played_on(spec) == url:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing is played on {url}")


def test_a_server_that_went_down_and_came_back_is_used_again_beside_one_that_stayed(game, start, tried_soon):
    goes = start("GuessSpec")

    async def main() -> None:
        async with registry.spec("game", urls=[goes.url, game.url], reconnect=0) as spec:
            assert await played_on(spec) == goes.url
            goes.process.kill()
            goes.process.wait()
            assert await played_on(spec) == game.url
            assert spec.replicas.down_replicas != []
            await asyncio.to_thread(start, "GuessSpec", f"port={urlsplit(goes.url).port}")
            await until_played_on(spec, goes.url)
            assert spec.replicas.down_replicas == []

    asyncio.run(main())


def test_a_server_that_starts_again_is_waited_for_though_the_other_has_been_gone_for_long(start):
    """Patience begins when the last server is lost, whichever of them a session is opened on."""
    goes, gone = start("GuessSpec"), start("GuessSpec")

    async def main() -> None:
        async with registry.spec("game", urls=[gone.url, goes.url], reconnect=10) as spec:
            for server, replica in zip((gone, goes), spec.replicas.servers, strict=True):
                server.process.kill()
                server.process.wait()
                with pytest.raises(RemoteError):
                    await replica.ask(EnvList, "GET", "/v1/envs", None, seconds=5, patience=0)
            first, _ = spec.replicas.servers
            first.transport.lost_at -= 1000
            starting = asyncio.create_task(asyncio.to_thread(start, "GuessSpec", f"port={urlsplit(goes.url).port}"))
            failed = 0
            while failed < 3:  # as `rollout.retries` allows
                try:
                    assert await played_on(spec) == goes.url
                    break
                except RemoteError:
                    failed += 1
            await starting
            assert failed < 3

    asyncio.run(main())


@pytest.mark.slow
def test_a_session_that_another_server_was_asked_for_is_not_kept_alive_on_the_first(game, start):
    frozen = start("GuessSpec", "limit.lease_seconds=0.4")

    async def main() -> None:
        async with registry.spec("game", urls=[frozen.url, game.url]) as spec:
            first, second = spec.replicas.servers
            frozen.process.send_signal(signal.SIGSTOP)
            env = spec.make()
            await env.reset(seed=1)
            assert (len(first.leases), len(second.leases)) == (0, 1)
            assert (first.in_use, second.in_use) == (0, 1)
            frozen.process.send_signal(signal.SIGCONT)
            assert await emptied(frozen.url)
            assert (await env.step(Action("no")))[4]["turns"] == 1
            await env.close()

    asyncio.run(main())


def test_a_lease_that_ended_is_renewed_no_more(start):
    server = start("GuessSpec", "limit.lease_seconds=0.4")

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            kept, left = spec.make(), spec.make()
            await asyncio.gather(kept.reset(seed=1), left.reset(seed=1))
            [replica] = spec.replicas.servers
            replica.leases.end(left._session)
            for _ in range(1200):
                await asyncio.sleep(0.05)
                if await counted(server.url, "envgym_sessions") == 1:
                    break
            assert (await kept.step(Action("no")))[4]["turns"] == 1
            with pytest.raises(RemoteError) as raised:
                await left.step(Action("no"))
            assert raised.value.kind == "session_lost"
            await asyncio.gather(kept.close(), left.close())

    asyncio.run(main())


@pytest.mark.parametrize("answer", [SICK, problem(504, "environment-timeout"), problem(404, "environment-not-found")])
def test_a_server_that_opens_no_sessions_costs_no_episode_where_there_is_another(game, answer):
    async def main() -> None:
        before = await counted(game.url, "envgym_sessions_opened_total")
        async with meddling(game.url, instead(answer, "/v1/sessions")) as sick:
            assert failures(await roll(registry.spec("game", urls=[sick, game.url]), tasks=4, retries=0)) == {}
            spec = registry.spec(sick)
            groups = await roll(spec, tasks=1, retries=1)
            assert failures(groups).keys() <= {"server", "timeout"}
            assert not all_played(groups)
        assert await counted(game.url, "envgym_sessions_opened_total") == before + 16

    asyncio.run(main())


def test_a_server_that_takes_our_token_no_more_is_asked_once(game):
    asked = 0

    async def refusing(request, forward):
        nonlocal asked
        asked += request.path == "/v1/sessions"
        if armed and request.path in ("/v1/sessions", "/v1/envs"):
            return problem(401, "unauthorized")
        return await forward()

    async def main() -> None:
        nonlocal armed
        async with meddling(game.url, refusing) as sick, registry.spec("game", urls=[sick, game.url]) as spec:
            armed = True
            with pytest.raises(RemoteError, match="token_file"):
                await played_on(spec)
            assert await played_on(spec) == game.url
            assert asked == 1

    armed = False
    asyncio.run(main())


def test_an_environment_that_refuses_a_reset_is_no_reason_to_leave_its_server(game):
    async def main() -> None:
        before = await counted(game.url, "envgym_sessions_opened_total")
        async with meddling(game.url) as other, registry.spec("game", urls=[game.url, other]) as spec:
            first = spec.replicas.servers[0]
            first.mark_down()
            first.try_after(0)
            env = spec.make()
            with pytest.raises(RemoteError, match="the dice are gone"):
                await env.reset(seed=1, options={"refuse": True})
            assert env._replica is first
            assert spec.replicas.down_replicas == []  # it answered, after all
            await env.close()
        assert await counted(game.url, "envgym_sessions_opened_total") == before + 1

    asyncio.run(main())


def test_a_server_that_came_back_with_other_tasks_is_refused_however_often_it_is_asked(start):
    server = start("GuessSpec")

    async def main() -> None:
        async with registry.spec(server.url, reconnect=5) as spec:
            task = await spec.tasks("train").get(0)
            server.process.kill()
            server.process.wait()
            await asyncio.to_thread(start, "GuessSpec", f"port={urlsplit(server.url).port}", "n=3")
            spec.replicas.servers[0].mark_down()
            for _ in range(2):
                env = spec.make()
                with pytest.raises(RemoteError, match="serves other tasks") as raised:
                    await env.reset(seed=1, options={"task": task})
                assert not raised.value.retryable
                await env.close()
                with pytest.raises(RemoteError, match="serves other tasks"):
                    await spec.tasks("train").get(120)

    asyncio.run(main())


def test_in_another_event_loop_the_tasks_must_be_the_same_too(start):
    server = start("GuessSpec")

    async def elsewhere(spec: EnvSpec) -> None:
        with pytest.raises(RemoteError, match="serves other tasks"):
            await played_on(spec)
        await spec.teardown()  # what this loop has

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            server.process.kill()
            server.process.wait()
            await asyncio.to_thread(start, "GuessSpec", f"port={urlsplit(server.url).port}", "n=3")
            await asyncio.to_thread(asyncio.run, elsewhere(spec))

    asyncio.run(main())


def test_a_server_with_other_tasks_that_answers_late_is_given_nothing(game, start):
    other, answered = start("GuessSpec", "n=3"), asyncio.Event()

    async def late(request, forward):
        if request.path == "/v1/envs" and not answered.is_set():
            await asyncio.sleep(0.7)
            answer = await forward()
            answered.set()
            return answer
        return await forward()

    async def main() -> None:
        async with meddling(other.url, late) as url, registry.spec("game", urls=[url, game.url], timeout=0.5) as spec:
            await answered.wait()
            [first, _] = spec.replicas.servers
            for _ in range(2):
                assert first.description is None
                first.try_after(0)
                assert await played_on(spec) == game.url
        assert await counted(other.url, "envgym_sessions_opened_total") == 0

    asyncio.run(main())


def test_those_who_wait_for_a_place_get_those_of_a_server_that_comes_back(start, tried_soon):
    full = start("GuessSpec", "limit.max_sessions=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> None:
        async with registry.spec("game", urls=[full.url, f"http://127.0.0.1:{port}"]) as spec:
            envs = [spec.make() for _ in range(5)]

            async def begin(env):
                await env.acquire()
                await env.reset(seed=1)

            begun = [asyncio.create_task(begin(env)) for env in envs]  # and none of them ends
            async with asyncio.timeout(30):
                while not any(task.done() for task in begun):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [task.done() for task in begun].count(True) == 1
            await asyncio.to_thread(start, "GuessSpec", "limit.max_sessions=4", f"port={port}")
            async with asyncio.timeout(60):
                await asyncio.gather(*begun)
            assert [replica.in_use for replica in spec.replicas.servers] == [1, 4]
            await asyncio.gather(*(env.close() for env in envs))

    asyncio.run(main())


def test_whoever_gives_up_connecting_leaves_nothing_behind():
    """Ctrl-C while a server keeps silent: no task goes on, and none ends with an exception that nobody reads."""
    complaints = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        heard = asyncio.Event()
        silent = await asyncio.start_server(lambda reader, writer: heard.set(), "127.0.0.1")
        async with silent:
            port = silent.sockets[0].getsockname()[1]
            connecting = asyncio.create_task(registry.spec(f"http://127.0.0.1:{port}/game").setup())
            await heard.wait()
            before = asyncio.all_tasks() - {connecting}
            connecting.cancel()
            await asyncio.wait([connecting])
            assert connecting.cancelled()
            assert {task for task in asyncio.all_tasks() if not task.done()} <= before
            del connecting, before

    asyncio.run(main())
    gc.collect()
    assert complaints == []


# ---------------------------------------------------------------------------------------------------------
# What every server can answer: tasks, judgements


def test_tasks_that_a_frozen_server_does_not_send_come_from_another_in_time(game, start):
    frozen = start("GuessSpec")

    async def main() -> None:
        async with registry.spec("game", urls=[frozen.url, game.url], timeout=1) as spec:
            frozen.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(0.9):
                assert (await spec.tasks("train").get(0)).id == "t0"

    asyncio.run(main())


def test_a_server_that_is_alone_is_asked_again_for_a_while(game):
    asked = 0

    async def sick_at_first(request, forward):
        nonlocal asked
        if not request.path.endswith("/tasks"):
            return await forward()
        asked += 1
        return await forward() if asked == 3 else web.Response(status=500, text="no")

    async def main() -> None:
        async with meddling(game.url, sick_at_first) as url, registry.spec(url) as spec:
            assert (await spec.tasks("train").get(0)).id == "t0"
            assert (asked, spec.replicas.down_replicas) == (3, [])
        async with meddling(game.url, instead(SICK, "/tasks")) as url, registry.spec(url, reconnect=0.3) as spec:
            with pytest.raises(RemoteError, match="500 Internal Server Error") as raised:
                await spec.tasks("train").get(0)
            assert raised.value.kind == "server"

    asyncio.run(main())


def test_what_the_request_is_to_blame_for_is_asked_once(game):
    asked = 0

    async def refusing(request, forward):
        nonlocal asked
        if not request.path.endswith("/tasks"):
            return await forward()
        asked += 1
        return problem(422, "invalid-request")

    async def main() -> None:
        async with (
            meddling(game.url, refusing) as url,
            meddling(game.url, refusing) as other,
            registry.spec("game", urls=[url, other]) as spec,
        ):
            with pytest.raises(RemoteError, match="so it is"):
                await spec.tasks("train").get(0)
            assert (asked, spec.replicas.down_replicas) == (1, [])

    asyncio.run(main())


GARBAGE = [
    SICK,
    web.Response(text="<html>hello</html>", content_type="text/html"),
    web.Response(text='{"envs": 3, "tasks": [1], "verdicts": "all"}', content_type="application/json"),
    web.Response(body=b"", content_type="application/json"),
    web.Response(status=404, body=b"{", content_type="application/problem+json"),
    problem(503, "shutting-down"),
]


@pytest.mark.parametrize("answer", GARBAGE)
def test_garbage_costs_nothing_where_another_server_knows(ranked, answer):
    """Whatever is asked of the sick one: what it serves, tasks, sessions, judgements."""

    async def main() -> None:
        for what in ("/v1/envs", "/tasks", "/v1/sessions", "/score_group"):
            async with (
                meddling(ranked.url, instead(answer, what)) as url,
                registry.spec("game", urls=[url, ranked.url], reconnect=0) as spec,
            ):
                task = await spec.tasks("train").get(0)
                found_late = what == "/score_group"
                assert await played_on(spec) == (url if found_late else ranked.url)
                judged = await spec.score_group(task, [Episode("e", task, Outcome.finish(), reward=2.0)])
                assert [one.reward for one in judged] == [0.0]
                assert [str(replica.address) for replica in spec.replicas.down_replicas] == [url]
        assert await counted(ranked.url, "envgym_sessions") == 0

    asyncio.run(main())


def test_a_server_that_is_alone_is_asked_for_a_judgement_again(ranked):
    asked = 0

    async def sick_at_first(request, forward):
        nonlocal asked
        asked += request.path.endswith("/score_group")
        return SICK if asked == 1 and request.path.endswith("/score_group") else await forward()

    async def main() -> None:
        async with meddling(ranked.url, sick_at_first) as url, registry.spec(url) as spec:
            task = await spec.tasks("train").get(0)
            assert len(await spec.score_group(task, [Episode("e", task, Outcome.finish(), reward=2.0)])) == 1
        assert asked == 2

    asyncio.run(main())


@pytest.mark.parametrize("what", ["/v1/sessions", "/step"])
def test_a_server_that_keeps_silent_costs_the_episodes_that_are_there_and_no_more(game, what):
    async def silent(request, forward):
        if request.path.endswith(what):
            await asyncio.sleep(60)
        return await forward()

    async def main() -> None:
        async with meddling(game.url, silent) as url:
            groups = await roll(registry.spec("game", urls=[url, game.url], timeout=0.5), tasks=4)
            assert all_played(groups)
            assert failures(groups).keys() == {"timeout"}

    asyncio.run(main())


@pytest.mark.parametrize("urls", [["http://127.0.0.1:1", "http://127.0.0.1:1/game"], ["http://127.0.0.1:1/a"] * 2])
def test_a_server_that_is_named_twice_is_refused(urls):
    with pytest.raises(ConfigError, match="the same server is named twice"):
        registry.spec("game", urls=urls)
