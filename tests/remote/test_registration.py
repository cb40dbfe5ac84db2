"""Servers that register at a trainer: they come, go, freeze and are started anew, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import envgym.registry as registry
from envgym.errors import ConfigError
from envgym.remote import replicas
from envgym.remote.application import Application
from envgym.remote.registration import Announcement, ListenerSettings
from envgym.remote.server import serve
from envgym.remote.transport import RemoteError
from envgym.types import Action, Episode, Outcome, Task

from .test_client_faults import after, all_played, failures, roll
from .test_walkthrough import PAGE, environment, run

ENVGYM = Path(sys.executable).with_name("envgym")
GAME = Path(__file__).with_name("game.py")
PATIENT = Path(__file__).with_name("patient.py")
TOKEN = "secret-0123456789abcdef"


class Registering:
    """`envgym serve game=… --register`; what the environment prints tells what it did."""

    def __init__(self, url: str, folder: Path, *words: str, env: str = f"{GAME}:GuessSpec", port: int = 0) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        command = [
            ENVGYM,
            "serve",
            f"game={env}",
            "--port",
            str(port),
            "--register",
            url,
            "--drain-seconds",
            "5",
            *words,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *words], stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )

    def says(self, what: str, seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and what not in self.log.read_text():
            time.sleep(0.05)
        return what in self.log.read_text()

    @property
    def episodes(self) -> int:
        return self.log.read_text().count("closed\n")


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envgym.remote.registration.LEASE_SECONDS", 2.0)


@pytest.fixture
def join(tmp_path) -> Iterator[Callable[..., Registering]]:
    servers: list[Registering] = []

    def start(port: int, *words: str, at: int = 0, **more: Any) -> Registering:
        servers.append(Registering(f"http://127.0.0.1:{port}", tmp_path, *words, port=at, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def spec_at(port: int, **settings: Any) -> Any:
    settings = {"listen": f"127.0.0.1:{port}", "allow": ["127.0.0.1"], "wait": 20.0, **settings}
    return registry.spec("game", **settings)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to that")


@contextlib.asynccontextmanager
async def both_there(port: int) -> AsyncIterator[None]:
    """Two servers have registered, and the address stays open."""
    async with spec_at(port) as spec:
        await both_know(spec)
        yield


@contextlib.asynccontextmanager
async def serving(
    port: int, env: str = f"{GAME}:GuessSpec", token_file: Path | None = None, **announced: Any
) -> AsyncIterator[list[str]]:
    """A server in this process that registers at `port`; gives the URLs it registered as."""
    urls: list[str] = []
    announcement = Announcement(f"http://127.0.0.1:{port}", token_file, **announced)
    server = asyncio.create_task(
        serve(
            {"game": registry.spec(env)}, "127.0.0.1", 0, on_ready=lambda url: None, announcement=announcement,
            on_registered=urls.append,
        )
    )  # fmt: skip
    try:
        yield urls
    finally:
        server.cancel()
        await asyncio.wait([server])


async def both_know(*specs: Any) -> None:
    """Wait until each has two servers."""
    await until(lambda: all(len(spec.replicas.servers) == 2 for spec in specs))


def test_one_is_killed_and_another_registers_in_mid_run(join, port):
    first, second = join(port), join(port)
    third: list[Registering] = []

    async def main() -> None:
        def change() -> None:
            first.process.kill()
            third.append(join(port))

        async with both_there(port):
            spec = spec_at(port, reconnect=1.0)
            async with spec:
                await both_know(spec)
                groups = await roll(spec, on_episode=after(10, change), tasks=40)
            assert all_played(groups)
            assert failures(groups).keys() <= {"connection"}
            assert 1 <= sum(failures(groups).values()) <= 8

    asyncio.run(main())
    assert second.episodes > 20
    assert third[0].episodes > 5


def test_one_that_is_sick_and_goes_on_registering_is_left_out_until_it_is_well(join, port, monkeypatch):
    """It answers everything but opens no session; with the smallest share of its places taken it would get them all."""
    monkeypatch.setattr(replicas, "FIRST_PAUSE", 0.5)
    opens, sick, asked = Application.open, True, 0

    async def open(self: Application, call: Any) -> bytes:
        nonlocal asked
        asked += 1
        if sick:
            raise RuntimeError("the disk is full")
        return await opens(self, call)

    monkeypatch.setattr(Application, "open", open)
    well = join(port)

    async def main() -> None:
        nonlocal sick, asked
        async with serving(port), spec_at(port) as spec:
            await both_know(spec)
            groups = await roll(spec, tasks=20)
            assert all_played(groups)
            assert failures(groups) == {}
            assert 1 <= asked <= 16  # those begun before it was found out, and one each time
        async with serving(port), spec_at(port) as spec:
            await both_know(spec)
            servers = spec.replicas
            async with asyncio.timeout(10):
                while not servers.down_replicas:
                    await two_resets(spec)
            sick, asked = False, 0
            async with asyncio.timeout(10):
                while not asked:
                    await two_resets(spec)
                    await asyncio.sleep(0.02)
            assert servers.down_replicas == []

    asyncio.run(main())
    assert well.episodes >= 80


async def two_resets(spec: Any) -> None:
    """At the same time, so that they go to two servers where there are two."""
    async with spec.make() as one, spec.make() as other:
        await asyncio.gather(one.reset(seed=1), other.reset(seed=2))


@pytest.mark.slow
def test_all_go_and_episodes_wait_for_the_next(join, port):
    first = join(port)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def change() -> None:
            first.process.kill()
            loop.call_later(4, join, port)

        groups = await roll(spec_at(port, reconnect=2.0), on_episode=after(10, change), episode_timeout=8.0)
        assert all_played(groups)
        assert set(failures(groups)) <= {"connection"}

    asyncio.run(main())


@pytest.mark.slow
def test_none_there_is_a_failure_of_its_own_kind(join, port):
    first = join(port)

    async def main() -> None:
        spec = spec_at(port, reconnect=2.5, wait=6.0)
        groups = await roll(spec, on_episode=after(10, first.process.kill), retries=1)
        assert not all_played(groups)
        assert failures(groups)["no_server"] >= 8
        assert all(e.outcome.retryable for g in groups for e in g.episodes if e.failed)

    asyncio.run(main())


def test_where_nobody_registers_in_time_it_is_said(port):
    with pytest.raises(RemoteError, match=r"no server has been registered for 0\.3 s") as raised:
        asyncio.run(spec_at(port, wait=0.3).setup())
    assert (raised.value.kind, raised.value.retryable) == ("no_server", True)


def test_a_server_that_is_asked_to_stop_finishes_what_it_has(join, port):
    first, second = join(port), join(port)

    async def main() -> None:
        async with both_there(port):
            spec = spec_at(port)
            async with spec:
                await both_know(spec)
                groups = await roll(spec, on_episode=after(10, first.process.terminate), retries=0)
            assert failures(groups) == {}
            assert await asyncio.to_thread(first.process.wait, 20) == 0

    asyncio.run(main())
    assert first.episodes + second.episodes == 32


def test_a_server_that_is_asked_to_stop_judges_and_closes_what_it_has(join, port, caplog):
    server = join(port, "env.judge_seconds=1", "env.close_seconds=0.2", env=f"{PATIENT}:PatientSpec")

    async def main() -> None:
        async with spec_at(port) as spec:
            env = spec.make()
            await env.reset(seed=1)
            task = Task("t", "?")
            judging = asyncio.create_task(spec.score_group(task, [Episode("e", task, Outcome.finish(), reward=1.0)]))
            assert await asyncio.to_thread(server.says, "judging")
            server.process.terminate()
            await until(lambda: not spec.replicas.has_servers)
            await env.step(Action("x"))
            await env.close()
            assert [judgement.reward for judgement in await judging] == [0.5]
            assert await asyncio.to_thread(server.process.wait, 20) == 0
            assert spec.counters.failures == 0

    asyncio.run(main())
    assert "takes no new sessions" in caplog.text
    assert "cannot be reached" not in caplog.text


def test_one_whose_lease_runs_out_gets_no_sessions_until_it_registers_again(join, port):
    server = join(port)

    async def main() -> None:
        async with spec_at(port, reconnect=0.0) as spec:
            [old] = spec.replicas.servers
            server.process.send_signal(signal.SIGSTOP)
            await until(lambda: not spec.replicas.has_servers)
            waiting = asyncio.create_task(roll(spec_at(port, reconnect=0.0), tasks=1, retries=0))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            server.process.send_signal(signal.SIGCONT)
            assert failures(await waiting) == {}
            await until(lambda: spec.replicas.has_servers)
            assert old not in spec.replicas.servers

    asyncio.run(main())
    assert server.episodes == 4


def test_a_server_that_is_started_anew_is_found_again_at_the_same_address(join, port):
    at = free_port()
    first = join(port, at=at)

    async def main() -> None:
        async with spec_at(port) as spec:
            env = spec.make()
            await env.reset(seed=1)
            first.process.kill()
            first.process.wait()
            second = join(port, at=at)
            assert await asyncio.to_thread(second.says, "registered at")
            with pytest.raises(RemoteError) as raised:
                await env.step(Action("1"))
            assert raised.value.kind in ("session_lost", "connection")
            await env.reset(seed=1)
            await env.step(Action("1"))
            await env.close()
            await until(lambda: len(spec.replicas.servers) == 1)

    asyncio.run(main())


def test_a_trainer_that_is_started_anew_finds_the_servers_again(join, port):
    server = join(port)

    async def main() -> None:
        assert await asyncio.to_thread(server.says, "keeps running, and retries")  # started before its trainer
        for _ in range(2):
            assert failures(await roll(spec_at(port), tasks=1, retries=0)) == {}

    asyncio.run(main())
    assert server.episodes == 8
    assert server.process.poll() is None


def test_sessions_go_where_room_times_weight_is(join, port):
    light, heavy = join(port), join(port, "--weight", "3")

    async def main() -> None:
        async with spec_at(port) as spec:
            await both_know(spec)
            envs = [spec.make() for _ in range(16)]
            for env in envs:
                await env.reset(seed=1)
            by_weight = {replica.weight: replica.in_use for replica in spec.replicas.servers}
            assert by_weight == {1.0: 4, 3.0: 12}
            for env in envs:
                await env.close()

    asyncio.run(main())
    assert (light.episodes, heavy.episodes) == (4, 12)


def test_one_that_registers_takes_its_part_beside_one_that_is_named(join, port, game):
    async def main() -> None:
        settings = {"listen": f"127.0.0.1:{port}", "allow": ["127.0.0.1"]}
        async with registry.spec(f"{game.url}/game", **settings) as spec:
            other = join(port)
            await both_know(spec)
            assert failures(await roll(spec, tasks=4, retries=0)) == {}
        assert 0 < other.episodes < 16

    asyncio.run(main())


def private(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def test_tokens_go_both_ways_and_a_wrong_one_is_refused_and_written_nowhere(join, port, tmp_path):
    servers = private(tmp_path / "servers", f"box {TOKEN}\nrival rival-{TOKEN}\n")
    register = private(tmp_path / "register", TOKEN)
    bad = private(tmp_path / "bad", f"wrong-{TOKEN}")
    own = private(tmp_path / "own", f"own-{TOKEN}")

    async def main() -> None:
        spec = spec_at(port, listen_token_file=servers, token_file=own)
        setup = asyncio.create_task(spec.setup())
        without, wrong = join(port), join(port, "--register-token-file", str(bad))
        for server in (without, wrong):
            assert await asyncio.to_thread(server.process.wait, 30) == 2
            assert "--register-token-file" in server.log.read_text()
            assert TOKEN not in server.log.read_text()
        other = join(port, "--register-token-file", str(register), "--token-file", str(bad))
        assert await asyncio.to_thread(other.says, "does not use this server: game: ")  # it knows another token
        assert not setup.done()
        right = join(port, "--register-token-file", str(register), "--token-file", str(own))
        await asyncio.wait_for(setup, 30)
        arguments = Path(f"/proc/{right.process.pid}/cmdline").read_bytes()
        arguments += Path(f"/proc/{right.process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in arguments + right.log.read_bytes() + other.log.read_bytes()
        assert TOKEN not in spec.to_json() + repr(vars(spec))
        async with aiohttp.ClientSession() as http:
            for path in ("/v1/servers", "/v1/envs"):
                assert (await http.post(f"http://127.0.0.1:{port}{path}", json={})).status == 401
            [replica] = spec.replicas.servers
            rivals = {"instance": "0" * 32, "url": replica.address.server, "leaving": True}
            says = {"Authorization": f"Bearer rival-{TOKEN}"}
            assert (await http.post(f"http://127.0.0.1:{port}/v1/servers", json=rivals, headers=says)).status == 200
            assert spec.replicas.has_servers  # a server speaks for itself alone
        await spec.teardown()

    asyncio.run(main())


def test_a_host_that_is_not_allowed_is_not_dialled(join, port):
    dialled = 0

    async def main() -> None:
        async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal dialled
            dialled += 1
            writer.close()

        async with await asyncio.start_server(dial, "127.0.0.1", 0) as elsewhere:
            url = f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}"
            setup = asyncio.create_task(spec_at(port, allow=["env-box", "10.0.0.0/8"]).setup())
            server = join(port, "--advertise", url)
            assert await asyncio.to_thread(server.process.wait, 30) == 2
            assert "dials the hosts in env.allow, and 127.0.0.1 is not one of them" in server.log.read_text()
            setup.cancel()
            await asyncio.wait([setup])
        assert dialled == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("entry", "taken", "refused"),
    [
        ("env-box", [("env-box", 1), ("ENV-BOX", 8000)], [("box", 8000)]),
        ("env-box:8000", [("env-box", 8000)], [("env-box", 8001), ("env-box", 80)]),
        ("10.0.0.0/8", [("10.1.2.3", 5)], [("11.0.0.1", 5)]),
        ("10.0.0.0/8:8000", [("10.1.2.3", 8000)], [("10.1.2.3", 22), ("11.0.0.1", 8000)]),
        ("::1", [("::1", 9)], [("::2", 9)]),
        ("[::1]:8000", [("::1", 8000)], [("::1", 8001)]),
        ("fd00::/8:8000", [("fd00::7", 8000)], [("fd00::7", 22), ("fe00::7", 8000)]),
    ],
)
def test_an_allowed_host_may_have_a_port(entry, taken, refused):
    spec_at(1, allow=[entry])
    listening = ListenerSettings("127.0.0.1:1", (entry,), None, None, None)
    assert [one for one in [*taken, *refused] if listening.allows(*one)] == taken


@pytest.mark.parametrize("guard", ["token_file", "ca_file"])
def test_beyond_loopback_a_server_is_dialled_by_https_alone_where_a_token_could_be_read(port, tmp_path, guard, caplog):
    servers, own = private(tmp_path / "servers", f"box {TOKEN}"), private(tmp_path / "own", f"own-{TOKEN}")
    run("openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out ca.pem -subj /CN=box", tmp_path)
    settings = {"token_file": own} if guard == "token_file" else {"ca_file": tmp_path / "ca.pem"}

    async def main() -> None:
        setup = asyncio.create_task(
            spec_at(port, allow=["box.invalid:8000"], listen_token_file=servers, **settings).setup()
        )

        async def answer(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
            body = {"version": 4, "instance": "0" * 32, "url": url}
            says = {"Authorization": f"Bearer {TOKEN}"}
            async with http.post(f"http://127.0.0.1:{port}/v1/servers", json=body, headers=says) as response:
                return response.status, await response.json()

        async with aiohttp.ClientSession() as http:
            for _ in range(200):
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    status, said = await answer(http, "http://box.invalid:8000")
                    break
                await asyncio.sleep(0.05)
            assert status == 200
            assert "dialled by https alone" in said["problems"][0]
            assert "dialled by https alone" in caplog.text
            status, said = await answer(http, "https://box.invalid:8000")
            assert "box.invalid:8000: cannot be reached" in said["problems"][0]  # it was dialled
            assert (await answer(http, "http://box.invalid:8001"))[0] == 403
        setup.cancel()
        await asyncio.wait([setup])

    asyncio.run(main())


def test_what_a_server_says_reaches_no_log_as_it_is(port, caplog):
    loud = "\x1b[2J\x1b]0;title\x07\nenvgym: all is well\u202e" + "x" * 10**5

    async def main() -> None:
        async def refuse(request: web.BaseRequest) -> web.Response:
            problem = {"type": "urn:envgym:problem:forbidden", "title": "x", "status": 403, "detail": loud}
            return web.json_response(problem, status=403, content_type="application/problem+json")

        runner = web.ServerRunner(web.Server(refuse))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        setup = asyncio.create_task(spec_at(port).setup())
        async with aiohttp.ClientSession() as http:
            body = {"version": 4, "instance": "0" * 32, "url": url}
            for _ in range(200):
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    await http.post(f"http://127.0.0.1:{port}/v1/servers", json=body)
                    break
                await asyncio.sleep(0.05)
            for odd in ("http://127.0.0.1\x1b[2J:1", "http://127.0.0.1/\x07"):
                assert (await http.post(f"http://127.0.0.1:{port}/v1/servers", json=body | {"url": odd})).status == 422
        setup.cancel()
        await asyncio.wait([setup])
        await runner.cleanup()

    asyncio.run(main())
    [message] = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert message.isprintable()
    assert r"\x1b[2J\x1b]0;title\x07\nenvgym: all is well\x202e" in message
    assert len(message) < 2000


def test_other_tasks_under_the_same_name_are_left_out_and_two_environments_share_an_address(join, port):
    first = join(port)

    async def main() -> None:
        async with spec_at(port) as spec, spec_at(port, timeout=100.0) as again:
            assert again.description == spec.description
            other, shifted = join(port, "env.n=3"), join(port, env=f"{GAME}:ShiftedSpec")
            assert await asyncio.to_thread(other.says, "does not use this server: game: ")
            assert "serves other tasks" in other.log.read_text()
            assert await asyncio.to_thread(shifted.says, "as many, but not the same")
            assert len(spec.replicas.servers) == 1
            groups = await roll(again, tasks=2, retries=0)
            assert failures(groups) == {}
        assert (other.episodes, shifted.episodes) == (0, 0)
        assert first.episodes == 8

    asyncio.run(main())


def test_one_that_cannot_be_dialled_is_told_so(join, port):
    async def main() -> None:
        setup = asyncio.create_task(spec_at(port).setup())
        server = join(port, "--advertise", f"http://127.0.0.1:{free_port()}")
        assert await asyncio.to_thread(server.says, "connection refused")
        assert "registered at" not in server.log.read_text()
        setup.cancel()
        await asyncio.wait([setup])

    asyncio.run(main())


def test_what_is_no_registration_is_refused_and_the_others_stay(join, port):
    join(port)

    async def main() -> None:
        async with spec_at(port) as spec, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}/v1/servers"
            good = {"version": 4, "instance": "0" * 32, "url": "http://127.0.0.1:9"}

            async def status(body: Any, **headers: str) -> int:
                return (await http.post(url, json=body, headers=headers)).status

            assert (await http.get(url)).status == 404
            assert await status(good, Origin="http://evil.example") == 403
            assert await status(good, Host="evil.example") == 403
            assert await status(good | {"version": 1}) == 409
            for wrong in ({"weight": -1}, {"instance": "x"}, {"url": "ftp://127.0.0.1"}, {"url": "x" * 2000}):
                assert await status(good | wrong) == 422
            for host in ("10.0.0.1", "127.0.0.1.evil.example", "127.0.0.1/x"):
                assert await status(good | {"url": f"http://{host}"}) in (403, 422)
            assert await status(good | {"url": "http://a:pass@127.0.0.1"}) == 422
            assert (await http.post(url, data=b"{}", headers={"Content-Type": "text/plain"})).status == 415
            assert (await http.post(url, json={"x": "y" * 2**15})).status == 413
            assert len(spec.replicas.servers) == 1
            env = spec.make()
            await env.reset(seed=1)
            await env.step(Action("1"))
            await env.close()

    asyncio.run(main())


def test_one_closes_while_another_opens_at_the_same_address(port):
    async def main() -> None:
        async with serving(port):
            first, second = spec_at(port), spec_at(port)
            await first.ensure_setup()
            closing = asyncio.create_task(first.close())
            await asyncio.sleep(0)
            async with second:
                await closing
                env = second.make()
                await env.reset(seed=1)
                await env.close()

    asyncio.run(main())


def test_a_tokens_quota_bounds_a_servers_room(port, tmp_path):
    file = private(tmp_path / "servers", f"box {TOKEN} max_sessions=2")
    own = private(tmp_path / "own", TOKEN)

    async def main() -> None:
        async with serving(port, token_file=own), spec_at(port, listen_token_file=file) as spec:
            assert [server.capacity for server in spec.replicas.servers] == [2]
            assert spec.concurrency_bound() == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "0.0.0.0:9000"}, "refusing to serve on 0.0.0.0 without env.listen_token_file"),
        ({"listen": "127.0.0.1"}, "HOST:PORT"),
        ({"listen": "http://127.0.0.1:9000"}, "HOST:PORT"),
        ({"allow": []}, "listen needs allow"),
        ({"allow": ["http://env-box"]}, "env-box"),
        ({"allow": ["10.0.0.0/99"]}, "10.0.0.0/99"),
        ({"listen": None}, "allow and the settings"),
        ({"listen": None, "allow": []}, "set urls, where it is served, or listen"),
        ({"allow": ["env-box:port"]}, "env-box:port"),
        ({"token_file": "own"}, "listen needs listen_token_file beside token_file"),
        ({"listen_tls_cert": "c"}, "TLS takes both files"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line(port, settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        asyncio.run(spec_at(port, **settings).setup())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--register", "127.0.0.1:9"], "not a usable URL"),
        (["--register", "http://a:pass@127.0.0.1:9"], "no user or password"),
        (["--register", "http://a:pass@127.0.0.1:port"], "no user or password"),
        (["--register", "http://127.0.0.1:9", "--advertise", "http://box:1/game"], "without an environment's name"),
        (["--register", "http://127.0.0.1:9", "--weight", "0"], "--weight is above 0"),
        (["--register", "http://192.0.2.1:9", "--port", "0"], "--host 0.0.0.0, or --advertise URL"),
        (["--weight", "2"], "--weight goes with --register"),
        (
            ["--register", "http://127.0.0.1:9", "--dialect", "nemo_gym", "--out", "x"],
            "has no option '--register'",
        ),
    ],
)
def test_a_wrong_option_is_one_line(words, said):
    done = subprocess.run(
        [ENVGYM, "serve", f"{GAME}:GuessSpec", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert "pass@" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_commands_train_on_a_server_that_registers(port, tmp_path, tiny_model):
    at = str(free_port())

    def lines(where: str) -> list[str]:
        [block] = re.findall(rf"^```sh\n# {where}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        names = {"https://trainer": "https://localhost", "CN=trainer": "CN=localhost", "DNS:trainer": "DNS:localhost"}
        more = {"=0.0.0.0:9000": "=127.0.0.1:9000", "9000": str(port), "8000": at, "env-box": "localhost"}
        for word, ours in {**names, **more}.items():
            block = block.replace(word, ours)
        return block.splitlines()

    box, trainer = tmp_path / "env-box", tmp_path / "trainer"
    box.mkdir()
    trainer.mkdir()
    [block] = re.findall(r"^```python\n(# secret_number.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (box / "secret_number.py").write_text(block)
    *prepare, train = lines("on the trainer, which listens")
    *before, serve = lines("on each server")
    for line in prepare:
        run(line, trainer)
    for name in ("servers", "token", "trainer.pem"):
        run(f"cp -p {trainer}/{name} .", box)
    for line in before:
        run(line, box)
    run(f"cp -p {box}/cert.pem box.pem", trainer)
    with (box / "log").open("w") as log:
        server = subprocess.Popen(
            f"exec {serve}", shell=True, cwd=box, env=environment(tmp_path), stdout=log, stderr=log
        )
    try:  # it is started first, and finds nobody
        short = "steps=2 rollout.tasks_per_step=4 rollout.group_size=2 rollout.max_tokens=8 eval.tasks=4"
        run(f"{train} --model {tiny_model} {short} engine.kind=transformers", trainer)
    finally:
        server.terminate()
        assert server.wait(40) == 0
    assert "registered at" in (box / "log").read_text()
    summary = trainer / "runs" / "registered" / "summary.json"
    assert '"status": "completed"' in summary.read_text()
    tokens = [(trainer / name).read_text().split()[-1] for name in ("servers", "token")]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("servers", "token")]
    assert [path for path in written for token in tokens if token.encode() in path.read_bytes()] == []
