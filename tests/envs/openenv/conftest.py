"""The real OpenEnv: small environments on its SDK in processes of its own, and its clients."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


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
        deadline = time.monotonic() + 90
        for port in self.ports:
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert self.process.poll() is None, self.out.read_text()[-3000:]
                assert time.monotonic() < deadline, self.out.read_text()[-3000:]
                time.sleep(0.1)

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
def free_ports():
    def free_ports(count):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for free in sockets:
                free.bind(("127.0.0.1", 0))
            return [free.getsockname()[1] for free in sockets]

    return free_ports


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
def rewards_of_their_client(openenv_package):
    """`rewards_of_their_client(url, jobs)`: the rewards that OpenEnv's own client sees, for each job of `theirs.py`."""
    python, variables = openenv_package

    def rewards(url, jobs, **more):
        command = [python, HERE / "theirs.py", url]
        environment = {**variables, **more}
        run = subprocess.run(
            command, input=json.dumps(jobs), env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return json.loads(run.stdout)

    return rewards


class Proxy:
    """A TCP proxy to a port, which cuts connections and rewrites what the client sends.

    `cut()` cuts now. After `cut_answers = True` each connection is cut once the server answers on it.
    """

    def __init__(self, port, rewrite=lambda data: data):
        self._port, self._rewrite = port, rewrite
        self._writers = set()
        self.cut_answers = False
        self.connections = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        self.cut()

    def cut(self):
        for writer in self._writers:
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


@pytest.fixture(scope="session")
def proxy():
    return Proxy
