"""The real OpenEnv: small environments on its SDK in processes of its own, and its clients."""

import asyncio
import contextlib
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import wait_until_listening

HERE = Path(__file__).parent
ENVGYM = Path(sys.executable).with_name("envgym")


@pytest.fixture(scope="session")
def documented():
    """`documented(words, **replaced)`: the words after `envgym` of the page's command that begins with `words`."""
    page = (HERE.parents[2] / "docs" / "reference" / "openenv.md").read_text()
    commands = re.findall(r"^```console\nenvgym (.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def documented(words, replaced):
        [command] = [command for command in commands if command.startswith(words)]
        for old, new in replaced.items():
            assert old in command
            command = command.replace(old, new)
        return shlex.split(command)

    return documented


class Peers:
    """A process with environments on OpenEnv's SDK, each at its own port."""

    def __init__(self, package, folder, environments, ports):
        self.python, variables = package
        self.log = folder / "peers.jsonl"
        self.variables = {**variables, "PEER_LOG": str(self.log)}
        places = [(name, str(port), str(size)) for (name, size), port in zip(environments, ports, strict=True)]
        self.words = [word for place in places for word in place]
        self.ports = ports
        self.urls = {name: f"http://127.0.0.1:{port}" for (name, _), port in zip(environments, ports, strict=True)}
        self.out = folder / "peers.log"

    def start(self):
        """Run the process until it answers at all ports."""
        with self.out.open("ab") as out:
            command = [self.python, HERE / "peers.py", *self.words]
            self.process = subprocess.Popen(command, env=self.variables, stdout=out, stderr=out)
        wait_until_listening(self.process, self.ports, self.out)

    def kill(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    async def until_closed(self):
        """Wait until every instance is closed."""
        async with asyncio.timeout(30):
            while len(self.logged("close")) < len(self.logged("open")):  # noqa: ASYNC110  # another process writes
                await asyncio.sleep(0.05)

    def logged(self, kind):
        """The values of all lines of a kind: `open`, `reset`, `step` or `close`."""
        lines = map(json.loads, self.log.read_text().splitlines() if self.log.exists() else ())
        return [value for each, _, value in lines if each == kind]


@pytest.fixture(scope="session")
def running_peers(openenv_package, tmp_path_factory, free_ports):
    """`with running_peers(("text", 1), …) as peers`: a new process with these environments, each with its capacity."""

    @contextlib.contextmanager
    def running_peers(*environments):
        ports = free_ports(len(environments))
        peers = Peers(openenv_package, tmp_path_factory.mktemp("peers"), environments, ports)
        peers.start()
        try:
            yield peers
        finally:
            peers.kill()

    return running_peers


@pytest.fixture(scope="session")
def peers(running_peers):
    """Every environment, for many sessions."""
    with running_peers(*((name, 200) for name in ("text", "integer", "silent", "pair", "tools"))) as peers:
        yield peers


@pytest.fixture(scope="session")
def their_clients(openenv_package):
    """`their_clients(url, jobs)`: what OpenEnv's own clients see of the jobs of `theirs.py`."""
    python, variables = openenv_package

    def see(url, jobs, **more):
        run = subprocess.run(
            [python, HERE / "theirs.py", url], input=json.dumps(jobs), env={**variables, **more}, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads(run.stdout)

    return see


class Server:
    """`envgym serve … --dialect openenv` in a process of its own: its `urls` are in the environments' order."""

    def __init__(self, environments, options, out):
        self.out = out
        with out.open("wb") as file:
            command = [ENVGYM, *environments, *options]
            if environments[0] != "serve":
                command = [ENVGYM, "serve", *environments, "--dialect", "openenv", "--port", "0", *options]
            self.process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file)
        self.urls, deadline = [], time.monotonic() + 90
        while len(self.urls) < (1 if environments[0] == "serve" else len(environments)):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)
            self.urls = re.findall(r"^serving .* at (\S+) ", self.log, re.MULTILINE)

    @property
    def log(self):
        return self.out.read_text()


@pytest.fixture(scope="session")
def serving_ours(tmp_path_factory):
    """`with serving_ours(["math_verify"], "--max-sessions", 2) as server`; or a whole command, `["serve", …]`."""

    @contextlib.contextmanager
    def serving_ours(environments, *options):
        server = Server(environments, options, tmp_path_factory.mktemp("server") / "log")
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    return serving_ours


class Proxy:
    """A TCP proxy to a port, which cuts connections and rewrites what the client sends.

    `cut()` cuts all connections, `cut(share)` some at random. After `cut_answers = True` the next one on which the
    server answers is cut before the answer.
    """

    def __init__(self, port, rewrite=lambda data: data):
        self._port, self._rewrite = port, rewrite
        self._writers, self._draws = set(), random.Random(0)
        self.cut_answers = False
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        self.cut()

    def cut(self, share=1.0):
        for writer in list(self._writers):
            if self._draws.random() < share:
                writer.transport.abort()

    async def _connect(self, reader, writer):
        self.connections += 1
        there, answer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, answer}
        with contextlib.suppress(asyncio.CancelledError):  # at the end of the test
            await asyncio.gather(self._pass_on(reader, answer, True), self._pass_on(there, writer, False))

    async def _pass_on(self, reader, writer, is_request):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                if not is_request and self.cut_answers:
                    self.cut_answers = False
                    self.cut()
                    return
                writer.write(self._rewrite(data) if is_request else data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)


@pytest.fixture(scope="session")
def proxy():
    return Proxy
