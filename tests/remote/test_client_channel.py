"""The WebSocket of a client's sessions, and what comes in its place: whatever becomes of it, every episode is played,
no step is taken twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from aiohttp import web

import envgym.registry as registry
from envgym.remote import remote_env, transport
from envgym.remote.access import Access
from envgym.remote.channel import CHANNEL_PATH
from envgym.remote.client import RemoteEnvSpec
from envgym.remote.transport import RemoteError
from envgym.types import Action

from .meddling import both_ways, instead, meddling, pump
from .test_client_faults import STEPS, counted, emptied, failures, roll


@pytest.fixture(autouse=True)
def nothing_left(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """No future whose error nobody asked for, no socket that nobody closed. (A client starts no process: those that end
    meanwhile are of other files' tests, whose event loops kept workers for the next call.)"""
    gc.collect()  # what tests of other files have left
    recwarn.clear()
    yield
    gc.collect()
    told = [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)]
    of_processes = ("unclosed file", "SubprocessTransport")
    assert [message for message in told if not any(kind in message for kind in of_processes)] == []
    logged = [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]
    assert [message for message in logged if "that handles pid" not in message] == []


def over_http(spec: RemoteEnvSpec) -> bool:
    channels = [replica.transport._asking for replica in spec.replicas.servers]
    return not any(channel is not None and channel.is_open for channel in channels)


def test_sessions_share_a_websocket_and_no_step_is_a_request_of_its_own(game):
    asked = []

    async def noted(request, forward):
        asked.append((request.method, request.path))
        return await forward()

    async def carry(ours, server):
        asked.append(("channel", ""))
        await both_ways(pump(ours, server), pump(server, ours))

    async def main() -> None:
        async with meddling(game.url, noted, carry) as url:
            assert failures(await roll(registry.spec(url), tasks=2, retries=0)) == {}
        assert asked.count(("channel", "")) == 1
        assert [path for _, path in asked if path.startswith("/v1/sessions")] == []

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 404, 502])
def test_where_the_websocket_is_refused_every_session_goes_over_http(game, status):
    asked = 0

    async def refusing(request, forward):
        nonlocal asked
        if request.path != "/v1/channel":
            return await forward()
        asked += 1
        return web.Response(status=status, text="no")

    async def main() -> None:
        before = await counted(game.url, "envgym_steps_total")
        async with meddling(game.url, refusing) as url:
            spec = registry.spec(url)
            assert failures(await roll(spec, tasks=2, retries=0, on_end=lambda: over_http(spec))) == {}
        assert await counted(game.url, "envgym_steps_total") == before + 8 * STEPS
        assert asked == 1

    asyncio.run(main())


def test_a_websocket_is_not_made_where_a_redirect_leads(game):
    asked = []

    async def noted(request, forward):
        asked.append(request.path)
        return await forward()

    async def main() -> None:
        async with meddling(game.url, noted) as there:
            moved = web.Response(status=302, headers={"Location": f"{there}/v1/channel"})
            async with meddling(game.url, instead(moved, "/v1/channel")) as url:
                spec = registry.spec(url)
                assert failures(await roll(spec, tasks=1, retries=0, on_end=lambda: over_http(spec))) == {}
        assert asked == []

    asyncio.run(main())


def test_where_the_websocket_hangs_it_is_given_up_once_and_sessions_go_over_http(game, monkeypatch):
    monkeypatch.setattr(transport, "CONNECT_SECONDS", 0.5)
    asked = 0

    async def hanging(request, forward):
        nonlocal asked
        if request.path == "/v1/channel":
            asked += 1
            await asyncio.sleep(60)
        return await forward()

    async def main() -> None:
        async with meddling(game.url, hanging) as url:
            spec = registry.spec(url)
            assert failures(await roll(spec, tasks=2, retries=0, on_end=lambda: over_http(spec))) == {}
        assert asked == 1

    asyncio.run(main())


def test_a_websocket_that_is_cut_in_mid_step_is_made_again_and_the_step_asked_for_again(game):
    async def main() -> None:
        messages, cut = itertools.count(1), 0

        def takes(message: bytes) -> bytes | None:
            nonlocal cut
            lost = next(messages) % 3 == 0
            cut += lost
            return None if lost else message

        async def carry(ours, server):
            await both_ways(pump(ours, server), pump(server, ours, takes))

        before = await counted(game.url, "envgym_steps_total")
        async with meddling(game.url, carry=carry) as url:
            spec = registry.spec(url)
            groups = await roll(spec, tasks=4, retries=0)
        assert failures(groups) == {}
        assert cut >= 3
        assert spec.counters.retries >= cut
        assert await counted(game.url, "envgym_steps_total") == before + 16 * STEPS
        assert await emptied(game.url)

    asyncio.run(main())


@pytest.mark.parametrize("nonsense", [b"nonsense", b'[[0,200,"x",9]]\nshort', "text"])
def test_nonsense_over_the_websocket_ends_it_and_sessions_go_on_over_http(game, nonsense):
    async def carry(ours, server):
        spoilt = itertools.chain([None, None, None], itertools.repeat(nonsense))
        await both_ways(pump(ours, server), pump(server, ours, lambda message: next(spoilt) or message))

    async def main() -> None:
        before = await counted(game.url, "envgym_steps_total")
        async with meddling(game.url, carry=carry) as url:
            spec = registry.spec(url)
            groups = await roll(spec, tasks=2, retries=0, on_end=lambda: over_http(spec))
        assert failures(groups) == {}
        assert await counted(game.url, "envgym_steps_total") == before + 8 * STEPS

    asyncio.run(main())


def test_a_message_that_is_too_large_is_not_read(game, monkeypatch):
    monkeypatch.setattr(transport, "MAX_MESSAGE", 100)

    async def main() -> None:
        spec = registry.spec(game.url)
        assert failures(await roll(spec, tasks=2, retries=0, on_end=lambda: over_http(spec))) == {}

    asyncio.run(main())


def test_a_websocket_that_carries_nothing_is_not_made_again_and_again(game):
    made = 0

    async def carry(ours, server):
        nonlocal made
        made += 1

    async def main() -> None:
        async with meddling(game.url, carry=carry) as url:
            assert failures(await roll(registry.spec(url), tasks=2, retries=0)) == {}
        assert made == 1

    asyncio.run(main())


def test_a_server_restarted_while_the_websocket_was_open_costs_its_sessions_and_no_more(start):
    server = start("GuessSpec")

    async def main() -> None:
        async with registry.spec(server.url) as spec:
            env, other = spec.make(), spec.make()
            await env.reset(seed=1)
            [replica] = spec.replicas.servers
            first = replica.transport._asking
            server.process.kill()
            server.process.wait()
            await asyncio.to_thread(start, "GuessSpec", f"port={urlsplit(server.url).port}")
            with pytest.raises(RemoteError) as raised:
                await env.step(Action("no"))
            assert raised.value.kind == "session_lost"
            await other.reset(seed=1)
            assert (await other.step(Action("no")))[4]["turns"] == 1
            assert not first.is_open
            assert replica.transport._asking.is_open
            await env.close()
            await other.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_freezes_with_sessions_in_a_step_fails_them_within_a_lease(start):
    server = start("GuessSpec", "limit.lease_seconds=0.4", "call_timeout=0.6")

    async def main() -> None:
        async with registry.spec(server.url, reconnect=0) as spec:
            envs = [spec.make() for _ in range(4)]
            await asyncio.gather(*(env.reset(seed=1) for env in envs))
            steps = [asyncio.create_task(env.step(Action("hang"))) for env in envs]
            for _ in envs:
                assert await asyncio.to_thread(server.line) == "hanging"
            server.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(4):
                said = await asyncio.gather(*steps, return_exceptions=True)
            assert [error.kind for error in said] == ["connection"] * 4
            async with asyncio.timeout(2):
                await asyncio.gather(*(env.close() for env in envs))
            [replica] = spec.replicas.servers
            assert (replica.in_use, len(replica.leases)) == (0, 0)
            server.process.send_signal(signal.SIGCONT)
            assert await emptied(server.url)

    asyncio.run(main())


def test_what_waits_for_the_websocket_may_give_up_before_it_comes_to_nothing(game, monkeypatch):
    monkeypatch.setattr(remote_env, "CLOSE_SECONDS", 0.2)
    given_up = asyncio.Event()

    async def hanging(request, forward):
        if request.path == "/v1/channel":
            await given_up.wait()
            request.transport.abort()
        return await forward()

    async def main() -> None:
        async with meddling(game.url, hanging) as url, registry.spec(url) as spec:
            env = spec.make()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await env.reset(seed=1)
            await env.close()
            [replica] = spec.replicas.servers
            [dialling] = replica.transport._dialling._tasks.values()
            given_up.set()
            await asyncio.wait([dialling])

    asyncio.run(main())


def test_who_waits_for_a_websocket_that_is_given_up_fails_and_is_not_cancelled():
    heard = asyncio.Event()

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        heard.set()

    async def main() -> None:
        silent = await asyncio.start_server(says_nothing, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        http = transport.Transport(url, Access({}), transport.Counters())
        asking = [asyncio.create_task(http.call("POST", f"/v1/sessions/{n}/step", b"{}", seconds=9)) for n in range(20)]
        async with asyncio.timeout(30):
            while CHANNEL_PATH not in http._dialling:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # all of them wait for it
        http.give_up(1.0)
        failed = await asyncio.gather(*asking, return_exceptions=True)
        assert {getattr(error, "kind", repr(error)) for error in failed} == {"connection"}
        await http.close()
        await asyncio.wait_for(heard.wait(), 30)
        silent.close()

    asyncio.run(main())
