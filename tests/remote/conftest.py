"""Servers in processes of their own, and a proxy that loses answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

import envgym.registry as registry
from envgym.env import EnvSpec
from envgym.net.tokens import Tokens
from envgym.remote.admission import ServerLimits
from envgym.remote.application import Application

GAME = Path(__file__).with_name("game.py")


class Server:
    """`game.py` serving one of its environments; what it prints is read line by line."""

    def __init__(self, *words: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(GAME), *words], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.line()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def line(self) -> str:
        """The next line it prints. Raises `queue.Empty` after 30 s, `EOFError` at the end."""
        line = self._lines.get(timeout=30)
        if line is None:
            raise EOFError
        return line

    def log(self) -> str:
        """What it has written to its log so far."""
        self._log.seek(0)
        return self._log.read()

    def rest(self) -> list[str]:
        """All lines that are left, to the end of the process."""
        lines = []
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.line())
        return lines

    def stop(self) -> int:
        """Ask it to end and wait; its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


@pytest.fixture(scope="session")
def new_server() -> type[Server]:
    """Starts a server; who does ends it."""
    return Server


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Start servers that end with the test."""
    servers: list[Server] = []

    def start(*words: str) -> Server:
        servers.append(Server(*words))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def game() -> Iterator[Server]:
    """One server of the game, for tests that leave it well."""
    server = Server("GuessSpec")
    yield server
    assert server.stop() == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine that nobody trusts yet, and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def losing_proxy() -> Callable[[str, int], contextlib.AbstractAsyncContextManager[str]]:
    """A proxy whose every nth connection takes a request to the server, waits for its answer, and hangs up."""

    @contextlib.asynccontextmanager
    async def proxy(url: str, every: int) -> AsyncIterator[str]:
        address = urlsplit(url)
        answers = 0

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal answers
            upstream, to_server = await asyncio.open_connection(address.hostname, address.port)

            async def requests() -> None:
                while data := await reader.read(65536):
                    to_server.write(data)
                to_server.close()

            async with asyncio.TaskGroup() as group:
                group.create_task(requests())
                while data := await upstream.read(65536):
                    answers += 1
                    if answers % every == 0:
                        break
                    writer.write(data)
                writer.close()
                reader.feed_eof()

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            yield f"http://{host}:{port}"

    return proxy


@pytest.fixture
def unruly() -> Callable[..., contextlib.AbstractAsyncContextManager[tuple[str, Application, EnvSpec]]]:
    """`unruly.py` served in this process: `async with unruly(limits, tokens, **settings) as (url, server, spec)`."""

    @contextlib.asynccontextmanager
    async def unruly(
        limits: ServerLimits | None = None, tokens: Tokens | None = None, **settings: Any
    ) -> AsyncIterator[tuple[str, Application, EnvSpec]]:
        spec = registry.spec(f"{GAME.with_name('unruly.py')}:UnrulySpec", **settings)
        application = Application({"game": spec}, limits or ServerLimits(), tokens)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            async with application.serve_requests(listener):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}", application, spec

    return unruly


class Channel:
    """A WebSocket of a server, spoken to as `frames` says, by someone who has only read that."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._numbers = itertools.count()
        self._answers: list[tuple[int, int, Any]] = []

    async def send(self, method: str, target: str, body: Any = None) -> int:
        """Ask, and give the request's number."""
        number, content = next(self._numbers), b"" if body is None else json.dumps(body).encode()
        head = json.dumps([[number, method, target, len(content)]]).encode()
        await self.socket.send_bytes(head + b"\n" + content)
        return number

    async def hear(self) -> tuple[int, int, Any]:
        """The next answer: its number, its status, and what it says."""
        if not self._answers:
            line, _, rest = (await self.socket.receive_bytes(timeout=20)).partition(b"\n")
            for number, status, content_type, length in json.loads(line):
                content, rest = rest[:length], rest[length:]
                self._answers.append((number, status, json.loads(content) if "json" in content_type else content))
        return self._answers.pop(0)

    async def ask(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        number = await self.send(method, target, body)
        answered, status, said = await self.hear()
        assert answered == number
        return status, said


@pytest.fixture
def channel() -> Callable[..., contextlib.AbstractAsyncContextManager[Channel]]:
    """`async with channel(url, token) as asking`: its `ask(method, target, body)` gives status and answer."""

    @contextlib.asynccontextmanager
    async def channel(url: str, token: str | None = None) -> AsyncIterator[Channel]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(f"{url}/v1/channel") as socket:
            yield Channel(socket)

    return channel
