"""Servers that dial the trainer: they come, go, freeze and lose their connection, and the run goes on."""

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
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

import envgym.registry as registry
from envgym.errors import ConfigError
from envgym.remote import replicas
from envgym.remote.application import Application
from envgym.remote.frames import Hello, Pieces
from envgym.remote.gate import Member
from envgym.remote.joining import serve_joined
from envgym.remote.replicas import Replicas
from envgym.remote.tokens import ANYONE
from envgym.remote.transport import RemoteError
from envgym.types import Action, Episode, Outcome, Task

from .test_client_faults import after, all_played, failures, roll
from .test_walkthrough import PAGE, environment, run

ENVGYM = Path(sys.executable).with_name("envgym")
GAME = Path(__file__).with_name("game.py")
PATIENT = Path(__file__).with_name("patient.py")
TOKEN = "secret-0123456789abcdef"


class Joined:
    """`envgym serve game=… --join`; what the environment prints tells what it did."""

    def __init__(self, url: str, folder: Path, *words: str, env: str = f"{GAME}:GuessSpec") -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [ENVGYM, "serve", f"game={env}", "--join", url, "--drain-seconds", "5", *words],
                stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def says(self, what: str, seconds: float = 60.0) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and what not in self.log.read_text():
            time.sleep(0.05)
        return what in self.log.read_text()

    @property
    def episodes(self) -> int:
        return self.log.read_text().count("closed\n")


@pytest.fixture
def join(tmp_path) -> Iterator[Callable[..., Joined]]:
    servers: list[Joined] = []

    def start(port: int, *words: str, **more: Any) -> Joined:
        servers.append(Joined(f"http://127.0.0.1:{port}", tmp_path, *words, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait()


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def spec_at(port: int, **settings: Any) -> Any:
    return registry.spec(f"joined://127.0.0.1:{port}/game", **{"wait": 20.0, **settings})


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to that")


@contextlib.asynccontextmanager
async def both_there(port: int) -> AsyncIterator[list[Any]]:
    """Two servers have joined, and the address stays open; gives those that are there."""
    async with spec_at(port) as spec:
        servers = spec.replicas._replicas
        await until(lambda: len(servers) == 2)
        yield servers


def test_one_is_killed_and_another_joins_in_mid_run(join, port):
    first, second = join(port), join(port)
    third: list[Joined] = []

    async def main() -> None:
        def change() -> None:
            first.process.kill()
            third.append(join(port))

        async with both_there(port):
            groups = await roll(spec_at(port, reconnect=1.0), on_episode=after(10, change), tasks=40)
            assert all_played(groups)
            assert failures(groups).keys() == {"connection"}
            assert 1 <= sum(failures(groups).values()) <= 8

    asyncio.run(main())
    assert second.episodes > 20
    assert third[0].episodes > 5


def test_one_that_is_sick_and_stays_connected_is_left_out_until_it_is_well(join, port, monkeypatch):
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
        async with serving(port, f"{GAME}:GuessSpec"):
            async with both_there(port):
                groups = await roll(spec_at(port), tasks=20)
                assert all_played(groups)
                assert failures(groups) == {}
                assert 1 <= asked <= 16  # those begun before it was found out, and one each time
            async with spec_at(port) as spec:
                servers = spec.replicas
                await until(lambda: len(servers._replicas) == 2)
                async with asyncio.timeout(10):
                    while not servers.down:
                        await two_resets(spec)
                sick, asked = False, 0
                async with asyncio.timeout(10):
                    while not asked:
                        await two_resets(spec)
                        await asyncio.sleep(0.02)
                assert servers.down == []

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
            loop.call_later(3, join, port)

        groups = await roll(spec_at(port, reconnect=0.5), on_episode=after(10, change), episode_timeout=5.0)
        assert all_played(groups)
        assert set(failures(groups)) <= {"connection"}

    asyncio.run(main())


@pytest.mark.slow
def test_none_there_is_a_failure_of_its_own_kind(join, port):
    first = join(port)

    async def main() -> None:
        groups = await roll(spec_at(port, reconnect=0.5, wait=6.0), on_episode=after(10, first.process.kill), retries=1)
        assert not all_played(groups)
        assert failures(groups)["no_server"] >= 8
        assert all(e.outcome.retryable for g in groups for e in g.episodes if e.failed)

    asyncio.run(main())
    with pytest.raises(RemoteError, match=r"no server has been there for 0\.3 s") as raised:
        asyncio.run(spec_at(port, wait=0.3).setup())
    assert (raised.value.kind, raised.value.retryable) == ("no_server", True)


def test_a_server_that_is_asked_to_stop_finishes_what_it_has(join, port):
    first, second = join(port), join(port)

    async def main() -> None:
        async with both_there(port):
            groups = await roll(spec_at(port), on_episode=after(10, first.process.terminate), retries=0)
            assert failures(groups) == {}
            assert await asyncio.to_thread(first.process.wait, 20) == 0

    asyncio.run(main())
    assert first.episodes + second.episodes == 32


@contextlib.asynccontextmanager
async def cutting(port: int, every: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A way to `port` on which every nth packet of the trainer's or the server's ends its connection, lost."""
    cuts = [0]
    packets = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal packets
        try:
            upstream, onward = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal packets
            while data := await source.read(65536):
                packets += 1
                if packets % every == 0:
                    cuts[0] += 1
                    return
                sink.write(data)

        pumps = [asyncio.create_task(pump(reader, onward)), asyncio.create_task(pump(upstream, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for task in pumps:
            task.cancel()
        for end in (writer, onward):
            end.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], cuts


def test_a_connection_that_drops_costs_nothing(join, port):
    async def main() -> None:
        async with cutting(port, 12) as (outside, cuts):
            server = join(outside)
            spec = spec_at(port)
            groups = await roll(spec, retries=0)
            assert failures(groups) == {}
            assert cuts[0] >= 5
            assert spec.counters.retries >= 5
        assert server.episodes == 32
        assert "joined again" in server.log.read_text()

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_freezes_is_left_and_used_again(join, port, monkeypatch):
    monkeypatch.setattr("envgym.remote.gate.PING_SECONDS", 0.6)
    first = join(port)
    second = join(port, "--weight", "0.5", "--max-sessions", "4")

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def freeze() -> None:
            first.process.send_signal(signal.SIGSTOP)
            loop.call_later(6, first.process.send_signal, signal.SIGCONT)

        async with both_there(port) as servers:
            groups = await roll(spec_at(port, reconnect=1.0), on_episode=after(10, freeze), tasks=20)
            assert all_played(groups)
            assert set(failures(groups)) == {"connection"}
            await until(lambda: not any(server.down for server in servers))  # it came back
            assert len(servers) == 2

    asyncio.run(main())
    assert second.episodes > 4


def test_sessions_go_where_room_times_weight_is(join, port):
    light, heavy = join(port), join(port, "--weight", "3")

    async def main() -> None:
        async with spec_at(port) as spec:
            await until(lambda: len(spec.replicas._replicas) == 2)
            envs = [spec.make() for _ in range(16)]
            for env in envs:
                await env.reset(seed=1)
            by_weight = {replica.weight: replica.taken for replica in spec.replicas._replicas}
            assert by_weight == {1.0: 4, 3.0: 12}
            for env in envs:
                await env.close()

    asyncio.run(main())
    assert (light.episodes, heavy.episodes) == (4, 12)


def test_a_wrong_token_is_refused_and_written_nowhere(join, port, tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for file, text in ((good, f"box {TOKEN}"), (bad, f"wrong-{TOKEN}")):
        file.touch(0o600)
        file.write_text(text)

    async def main() -> None:
        spec = spec_at(port, token_file=good)
        setup = asyncio.create_task(spec.setup())
        without, wrong = join(port), join(port, "--token-file", str(bad))
        for server in (without, wrong):
            assert await asyncio.to_thread(server.process.wait, 20) == 2
            assert "refuses this server (401)" in server.log.read_text()
            assert TOKEN not in server.log.read_text()
        assert not setup.done()
        right = join(port, "--token-file", str(good))
        await asyncio.wait_for(setup, 20)
        arguments = Path(f"/proc/{right.process.pid}/cmdline").read_bytes()
        arguments += Path(f"/proc/{right.process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in arguments + right.log.read_bytes()
        assert TOKEN not in spec.to_json() + repr(vars(spec))
        async with aiohttp.ClientSession() as http:
            for path in ("/v1/join", "/v1/envs"):
                assert (await http.get(f"http://127.0.0.1:{port}{path}")).status == 401
        await spec.teardown()

    asyncio.run(main())


def test_what_is_no_server_is_turned_away_and_the_others_stay(join, port, monkeypatch):
    monkeypatch.setattr("envgym.remote.gate.HELLO_SECONDS", 1.0)
    join(port)

    async def main() -> None:
        spec = spec_at(port)
        await spec.setup()
        url = f"http://127.0.0.1:{port}/v1/join"
        hello = '{"version":3,"instance":"%s","name":"x","weight":1}' % ("0" * 32)
        async with aiohttp.ClientSession() as http:
            assert (await http.get(url)).status == 404
            for says in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                assert (await http.get(url, headers=says)).status == 403
            async with http.ws_connect(url) as link:  # says nothing
                assert (await link.receive(timeout=5)).type is aiohttp.WSMsgType.CLOSE
                assert link.close_code == 1008
            for said in ("hello", hello.replace("3", "1"), hello.replace("1}", "-1}")):
                async with http.ws_connect(url) as link:
                    await link.send_str(said)
                    assert (await link.receive()).type is aiohttp.WSMsgType.CLOSE
                    assert link.close_code == 1008
            async with http.ws_connect(url) as link:  # says the right thing, and then nonsense
                await link.send_str(hello)
                assert (await link.receive()).type is aiohttp.WSMsgType.TEXT
                await link.receive_bytes()
                await link.send_bytes(b"\xff\xfe{}")
                assert (await link.receive()).type is aiohttp.WSMsgType.CLOSE
        assert len(spec.replicas._replicas) == 1
        env = spec.make()
        await env.reset(seed=1)
        await env.step(Action("1"))
        await env.close()
        await spec.teardown()

    asyncio.run(main())


def test_other_tasks_under_the_same_name_are_left_out_and_two_names_share_an_address(join, port):
    first = join(port)

    async def main() -> None:
        async with spec_at(port) as spec, registry.spec(f"joined://127.0.0.1:{port}", wait=20.0) as again:
            assert again.description == spec.description
            other = join(port, "env.n=3")
            assert await asyncio.to_thread(other.says, f"this server is left out of joined://127.0.0.1:{port}")
            assert len(spec.replicas._replicas) == 1
            groups = await roll(again, tasks=2, retries=0)
            assert failures(groups) == {}
        assert other.episodes == 0
        assert first.episodes == 8

    asyncio.run(main())


def test_one_that_stays_away_is_forgotten(join, port, monkeypatch):
    monkeypatch.setattr("envgym.remote.gate.GONE_SECONDS", 0.5)
    first = join(port)

    async def main() -> None:
        async with spec_at(port) as spec:
            servers = spec.replicas._replicas
            old = servers[0]
            first.process.kill()
            await until(lambda: len(servers) == 0)
            join(port)
            groups = await roll(spec, tasks=2, retries=0)
            assert failures(groups) == {}
            assert old not in servers

    asyncio.run(main())


def test_what_is_too_large_for_a_message_is_refused_and_the_connection_stays(port, monkeypatch):
    monkeypatch.setattr("envgym.remote.links.MAX_BODY", 4000)
    monkeypatch.setattr("envgym.remote.joined.MAX_BODY", 4000)

    async def main() -> None:
        served = {"game": registry.spec(f"{GAME}:GuessSpec")}
        server = asyncio.create_task(
            serve_joined(served, f"http://127.0.0.1:{port}/", on_joined=lambda: joined.append(1))
        )
        async with spec_at(port) as spec:
            with pytest.raises(RemoteError, match="the answer has more than 4000 bytes") as raised:
                await spec.tasks("train").get(0)  # it comes with a page of others
            assert (raised.value.kind, raised.value.retryable) == ("refused", False)
            env = spec.make()
            await env.reset(seed=1)
            with pytest.raises(RemoteError, match="a body has at most 4000 bytes"):
                await env.step(Action("x" * 5000))
            await env.reset(seed=1)
            await env.step(Action("1"))
            await env.close()
        server.cancel()
        await asyncio.wait([server])

    joined: list[int] = []
    asyncio.run(main())
    assert joined == [1]


@contextlib.asynccontextmanager
async def slow(port: int, bytes_a_second: int) -> AsyncIterator[int]:
    """A way to `port` that lets so much through, each way."""
    share = bytes_a_second // 50

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(share):
            sink.write(data)
            await sink.drain()
            await asyncio.sleep(len(data) / bytes_a_second)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, onward = await asyncio.open_connection("127.0.0.1", port, limit=share)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, onward), pump(upstream, writer), return_exceptions=True)
        for end in (writer, onward):
            end.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0, limit=share)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def serving(
    port: int, env: str = f"{PATIENT}:PatientSpec", token_file: Path | None = None
) -> AsyncIterator[None]:
    """A server in this process that joins at `port`."""
    specs = {"game": registry.spec(env)}
    url = f"http://127.0.0.1:{port}"
    server = asyncio.create_task(serve_joined(specs, url, on_joined=lambda: None, token_file=token_file))
    try:
        yield
    finally:
        server.cancel()
        await asyncio.wait([server])


def test_a_large_body_takes_its_time_and_holds_nobody_up(port, monkeypatch):
    for end in ("gate", "joining"):
        monkeypatch.setattr(f"envgym.remote.{end}.PING_SECONDS", 0.4)  # 0.6 s in which nothing is heard end it
    monkeypatch.setattr("envgym.env.checked.MOST_CHARACTERS", 10_000_000)

    async def main() -> None:
        async with (
            slow(port, 6_000_000) as outside,
            serving(outside),
            spec_at(port, reconnect=1.0, timeout=15.0) as spec,
        ):
            large, small = spec.make(), spec.make()
            for env in (large, small):
                await env.reset(seed=1)
            text = "x" * 5_000_000
            sending = asyncio.create_task(large.step(Action(text)))
            await asyncio.sleep(0)
            for _ in range(2):
                assert (await small.step(Action("y")))[0].text == "y"
            assert not sending.done()
            assert (await sending)[0].text == text
            assert spec.counters.retries == 0
            for env in (large, small):
                await env.close()

    asyncio.run(main())


def test_more_pieces_than_the_largest_body_has_are_refused():
    pieces = Pieces(8)
    assert [pieces.add(piece) for piece in (b"+12345", b"+", b".678")] == [None, None, b"12345678"]
    pieces.add(b"+12345")
    with pytest.raises(ValueError, match="too many"):
        pieces.add(b"+12345")


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


def test_a_certificate_that_is_not_trusted_ends_the_server(port, certificate):
    cert, key = certificate

    async def main() -> None:
        served = {"game": registry.spec(f"{GAME}:GuessSpec")}
        spec = spec_at(port, tls_cert=str(cert), tls_key=str(key))
        listening = asyncio.create_task(spec.ensure_setup())
        await until(lambda: connections_at(port, LISTENING) == 1)
        with pytest.raises(ConfigError, match=r"its certificate is not trusted here .* --ca-file"):
            await serve_joined(served, f"https://127.0.0.1:{port}", on_joined=print)
        listening.cancel()
        await asyncio.wait([listening])
        await spec.close()

    asyncio.run(main())


def test_two_names_of_an_address_are_one_address(port):
    async def main() -> None:
        async with serving(port), spec_at(port) as spec, registry.spec(f"joined://127.1:{port}", wait=5.0) as again:
            assert again.description == spec.description

    asyncio.run(main())


ESTABLISHED, LISTENING = "01", "0A"


def connections_at(port: int, state: str = ESTABLISHED) -> int:
    """How many there are, as the kernel has it."""
    return sum(line[3] == state for line in sockets_at(port))


def sockets_at(port: int) -> list[list[str]]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [line for line in lines if line[1].endswith(f":{port:04X}")]


def unsent_at(port: int) -> int:
    """Bytes that the other end has not taken."""
    return sum(int(line[4].partition(":")[0], 16) for line in sockets_at(port) if line[3] == ESTABLISHED)


def test_one_that_is_frozen_with_a_large_body_under_way_is_let_go(join, port, monkeypatch):
    monkeypatch.setattr("envgym.remote.links.CLOSE_SECONDS", 0.2)
    server = join(port, env=f"{PATIENT}:PatientSpec")

    async def main() -> None:
        async with spec_at(port, reconnect=0.0) as spec:
            env = spec.make()
            await env.reset(seed=1)
            server.process.send_signal(signal.SIGSTOP)
            stepping = asyncio.create_task(env.step(Action("x" * 20_000_000)))
            await until(lambda: unsent_at(port) > 0)
            assert connections_at(port) == 1
        stepping.cancel()
        await asyncio.wait([stepping])
        assert connections_at(port) == 0

    asyncio.run(main())


def test_who_is_asked_to_stop_judges_and_closes_what_it_has(join, port, caplog):
    server = join(port, "env.judge_seconds=1", "env.close_seconds=0.2", env=f"{PATIENT}:PatientSpec")

    async def main() -> None:
        async with spec_at(port) as spec:
            env = spec.make()
            await env.reset(seed=1)
            task = Task("t", "?")
            judging = asyncio.create_task(spec.score_group(task, [Episode("e", task, Outcome.completed(), reward=1.0)]))
            assert await asyncio.to_thread(server.says, "judging")
            server.process.terminate()
            await until(lambda: not spec.replicas.anyone)
            await env.step(Action("x"))
            await env.close()
            assert [judgement.reward for judgement in await judging] == [0.5]
            assert await asyncio.to_thread(server.process.wait, 20) == 0
            assert spec.counters.failures == 0

    asyncio.run(main())
    assert "takes no new sessions" in caplog.text
    assert "cannot be reached" not in caplog.text


def test_a_tokens_quota_bounds_a_servers_room(port, tmp_path):
    file = tmp_path / "servers"
    file.touch(0o600)
    file.write_text(f"box {TOKEN} max_sessions=2")

    async def main() -> None:
        async with serving(port, token_file=file), spec_at(port, token_file=file) as spec:
            assert [server.room for server in spec.replicas._replicas] == [2]
            assert spec.concurrency_bound() == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("joined://0.0.0.0:9000/game", {}, "refusing to let servers join at 0.0.0.0 without tokens"),
        ("joined://127.0.0.1/game", {}, "not a usable URL"),
        ("joined://me:pass@127.0.0.1:9000/game", {}, "no user or password"),
        ("joined://me:pass@127.0.0.1:port/game", {}, "no user or password"),
        ("joined://127.0.0.1:9000/game", {"tls_cert": "c"}, "TLS takes both files"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(name, settings, said):
    with pytest.raises(ConfigError, match=said) as raised:
        asyncio.run(registry.spec(name, **settings).setup())
    assert "pass@" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "127.0.0.1:9"], "not a usable URL"),
        (["--join", "http://a:pass@127.0.0.1:9"], "no user or password"),
        (["--join", "http://a:pass@127.0.0.1:port"], "no user or password"),
        (["--join", "http://127.0.0.1:9", "--port", "1"], "--port does not go with --join"),
        (["--join", "http://127.0.0.1:9", "--weight", "0"], "--weight is above 0"),
        (["--weight", "2"], "go with --join"),
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
def test_the_pages_commands_train_on_a_server_that_joined(port, tmp_path, tiny_model):
    def lines(where: str) -> list[str]:
        [block] = re.findall(rf"^```sh\n# {where}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        here = {"https://trainer": "https://localhost", "=trainer": "=localhost", "DNS:trainer": "DNS:localhost"}
        for word, ours in {**here, "0.0.0.0": "127.0.0.1", "9000": str(port)}.items():
            block = block.replace(word, ours)
        return block.splitlines()

    box, trainer = tmp_path / "env-box", tmp_path / "trainer"
    box.mkdir()
    trainer.mkdir()
    [block] = re.findall(r"^```python\n(# secret_number.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (box / "secret_number.py").write_text(block)
    *prepare, train = lines("on the trainer")
    [serve] = lines("on env-box, behind a firewall")
    for line in prepare:
        run(line, trainer)
    run(f"cp -p {trainer}/servers {trainer}/cert.pem .", box)
    with (box / "log").open("w") as log:
        server = subprocess.Popen(
            f"exec {serve}", shell=True, cwd=box, env=environment(tmp_path), stdout=log, stderr=log
        )
    try:  # it is started first, and finds nobody
        short = "steps=2 rollout.tasks=4 rollout.group_size=2 rollout.max_tokens=8 eval.tasks=4"
        run(f"{train} --model {tiny_model} {short} engine.kind=transformers", trainer)
    finally:
        server.terminate()
        assert server.wait(40) == 0
    assert "serving" in (box / "log").read_text()
    summary = trainer / "runs" / "joined" / "summary.json"
    assert '"status": "completed"' in summary.read_text()
    token = (trainer / "servers").read_text().split()[1]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "servers"]
    assert [path for path in written if token.encode() in path.read_bytes()] == []


class BreakingSocket:
    """A WebSocket whose other end is gone, which only writing shows."""

    closed = False

    def __aiter__(self) -> BreakingSocket:
        return self

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()

    async def send_bytes(self, message: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("cannot write to closing transport")

    async def close(self, code: int) -> None:
        pass


def test_a_connection_that_breaks_under_a_request_is_no_connection_any_more():
    async def main() -> None:
        member = Member(ANYONE, Hello(instance="0" * 32, name="x"), lambda member: None)
        listening = asyncio.create_task(member.listen(BreakingSocket(), SimpleNamespace(transport=None)))
        await asyncio.sleep(0)
        assert await member.connected(0)
        with pytest.raises(ConnectionError):
            await member.send("GET", "/v1/envs", b"")
        assert not await member.connected(0.01)  # or who asks again would ask for ever
        listening.cancel()

    asyncio.run(main())


def test_where_the_last_server_has_gone_there_is_nobody_to_ask():
    async def main() -> None:
        with pytest.raises(RemoteError, match="the last server has gone") as raised:
            Replicas(()).any_up()
        assert (raised.value.kind, raised.value.retryable) == ("connection", True)

    asyncio.run(main())
