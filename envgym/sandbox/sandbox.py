"""Runs untrusted Python programs, each in a process with limits, isolated from the host's files, users and network.

    async with Sandbox(Limits(cpu_seconds=2)) as sandbox:
        execution = await sandbox.run("print(input()[::-1])", stdin="hello")
        execution.stdout, execution.reason         # 'olleh\n', 'ok'

A small server process, which shares no memory with the training process, forks for every program (see `jail`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Self

from pydantic import ConfigDict, Field

from envgym.errors import ConfigError, InvalidOutcome
from envgym.settings import Settings

from .jail import wire

START_SECONDS = 60.0
GRACE_SECONDS = 30.0
"""Maximum delay of a program's report after its wall time, at which the supervisor ends it."""
KIND = "sandbox"
"""The kind of the outcome if the sandbox itself fails."""

Reason = Literal["ok", "error", "timeout", "memory", "output", "processes"]

_SERVER = "import sys; sys.path.append(sys.argv[1]); from jail.server import main; main()"
_WAYS = ("root", "user", "confined")
_SHARED = "programs share this machine's kernel, its clock and its CPUs"
_ALSO_SHARED = "see which files exist, share the disk with everybody, and can start no process of their own"


class Limits(Settings):
    """Limits of one program. A program that exceeds a limit is ended, or its request to the kernel fails."""

    model_config = ConfigDict(frozen=True)

    cpu_seconds: float = Field(5.0, gt=0)
    """CPU time of all its threads and processes together."""
    wall_seconds: float = Field(15.0, gt=0)
    """Time from start to end. Leave headroom: a busy machine gives a program less than one CPU."""
    memory_mb: int = Field(512, ge=64)
    """Address space of each process, and memory of all of them together (checked every 0.2 s)."""
    output_kb: int = Field(1024, ge=1)
    """Output, standard error included."""
    disk_mb: int = Field(64, ge=1)
    """Total size of its files, which are held in memory."""
    files: int = Field(1000, ge=10)
    """Files and folders that it may make."""
    open_files: int = Field(64, ge=16)
    """Files each process may have open."""
    processes: int = Field(16, ge=1)
    """Concurrent threads and processes."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a program ended, and its output.

    `reason` is `ok` for exit status 0, `error` for any other status or a signal, or else the limit that the program
    exceeded. `exit` is the status, negative for a signal. `seconds` are wall time, `cpu` seconds of CPU time, 0 if the
    limit on it ended the program. Bytes of the output that are not UTF-8 become replacement characters.
    """

    stdout: str
    stderr: str
    exit: int
    reason: Reason
    seconds: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are isolated from this machine: by `namespaces`, or by `landlock` where these cannot be used, which
    `reason` explains. `not_isolated` lists what programs still share with the machine, as parts of a sentence."""

    kind: Literal["namespaces", "landlock"]
    not_isolated: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        return f"sandbox ({self.kind}): {', '.join(self.not_isolated)}{self.reason and f' ({self.reason})'}"


class Sandbox:
    """Runs programs, at most `concurrency` at a time (default: two for each CPU); others wait.

    Programs may import the standard library and `packages`, a list of import names; list the packages that these import
    as well. `start`, or the first program, starts the sandbox. It works in any event loop. If the sandbox itself fails,
    it raises `InvalidOutcome`, so that nobody takes this for a failure of the program.
    """

    def __init__(
        self, limits: Limits | None = None, *, concurrency: int | None = None, packages: Sequence[str] = ()
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(f"the sandbox needs Linux; this is {sys.platform}: run in a container or on a server")
        self.limits = limits or Limits()
        self.isolation: Isolation | None = None
        self._concurrency = concurrency or 2 * len(os.sched_getaffinity(0))
        self._packages = {name: path for package in packages for name, path in _find_files(package).items()}
        self._ways = _WAYS
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def start(self) -> Isolation:
        """Start the sandbox unless it runs, and return how it isolates programs. The first start logs that in one line.

        Raises `ConfigError` if programs cannot be isolated here.
        """
        await self._ensure_server()
        assert self.isolation is not None
        return self.isolation

    async def run(self, source: str, stdin: str = "", files: Mapping[str, str | bytes] | None = None) -> Execution:
        """Run a program to its end. Its folder holds only the program (`main.py`) and `files`, by their relative names.

        If the call is cancelled, the program ends. Raises `InvalidOutcome` if the sandbox fails, and `ValueError` for
        an absolute name or one with `..`.
        """
        contents = {_check_name(name): _encode(content) for name, content in (files or {}).items()}
        header = {"names": list(contents), **self.limits.model_dump()}
        request = wire.pack(header, (_encode(source), _encode(stdin), *contents.values()))
        async with self._slot():
            report, output = await self._ask(request)
        if "failed" in report:
            raise InvalidOutcome(KIND, f"a program could not be run: {report['failed']}", retryable=True)
        stdout, stderr = (piece.decode(errors="replace") for piece in output)
        return Execution(stdout, stderr, report["exit"], report["reason"], report["seconds"], report["cpu"])

    async def close(self) -> None:
        """End the server. Running programs continue to their end."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._concurrency))
        return self._slots[1]

    async def _ask(self, request: bytes) -> tuple[dict[str, Any], list[bytes]]:
        """Run a program by a new supervisor. Raises `InvalidOutcome` if there is no report."""
        server = await self._ensure_server()
        connection, server_end = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            server.connect(server_end)
            async with asyncio.timeout(self.limits.wall_seconds + GRACE_SECONDS):
                writer.write(request)
                await writer.drain()
                [length] = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
                report, sizes = json.loads(await reader.readexactly(length))
                return report, [await reader.readexactly(size) for size in sizes]
        except TimeoutError:
            raise InvalidOutcome(KIND, "the supervisor of a program does not answer", retryable=True) from None
        except (asyncio.IncompleteReadError, OSError):
            raise InvalidOutcome(KIND, "the supervisor of a program died", retryable=True) from None
        finally:
            writer.close()  # ends a program that is still running

    async def _ensure_server(self) -> _Server:
        server = self._server
        return server if server is not None and server.alive() else await asyncio.to_thread(self._start)

    def _start(self) -> _Server:
        """The server, which is started unless it is alive. The first start sets `isolation` and logs it."""
        with self._lock:
            if self._server is None or not self._server.alive():
                self._server = _Server(self._packages, self._ways)
                if self.isolation is None:
                    self.isolation = self._server.isolation
                    level = logging.INFO if self.isolation.kind == "namespaces" else logging.WARNING
                    logging.getLogger(__name__).log(level, "%s", self.isolation)
            return self._server


class _Server:
    """The server process and the socket over which it receives connections."""

    def __init__(self, packages: Mapping[str, str], ways: Sequence[str]) -> None:
        self._control, server_end = socket.socketpair()
        command = [sys.executable, "-s", "-S", "-P", "-c", _SERVER, str(Path(__file__).parent)]
        with server_end, tempfile.TemporaryFile() as errors:
            # It inherits no variables, open files, terminal or signals.
            self._process = subprocess.Popen(
                command, stdin=server_end.fileno(), stdout=subprocess.DEVNULL, stderr=errors, env={}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            server_end.close()
            try:
                self.isolation = self._choose_isolation(packages, ways)
            except (EOFError, OSError) as error:
                self.close()
                reason = _last_line(errors) or f"{type(error).__name__} {error}".strip()
                raise InvalidOutcome(KIND, f"the sandbox's server does not start: {reason}", retryable=True) from None
            except BaseException:
                self.close()
                raise

    def alive(self) -> bool:
        return self._process.poll() is None

    def connect(self, server_end: socket.socket) -> None:
        """Hand one end of a connection to a new supervisor, and close it here. Raises `OSError` if the server has
        died."""
        with server_end:
            socket.send_fds(self._control, [b"+"], [server_end.fileno()])

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _choose_isolation(self, packages: Mapping[str, str], ways: Sequence[str]) -> Isolation:
        """Send the settings; receive the isolation that works here. Raises `ConfigError` if there is none."""
        self._control.settimeout(START_SECONDS)
        self._control.sendall(wire.pack({"packages": packages, "ways": ways, "temporary": tempfile.gettempdir()}))
        report, _ = wire.receive(self._control)
        reason = "; ".join(report["errors"].values())
        if not report["way"]:
            needs = "Linux 5.14 with user namespaces, or with Landlock"
            raise ConfigError(f"the sandbox cannot isolate programs here ({reason}): it needs {needs}")
        if report["way"] == "confined":
            return Isolation("landlock", (_SHARED, _ALSO_SHARED), reason and f"no namespaces: {reason}")
        return Isolation("namespaces", (_SHARED,))


def _find_files(package: str) -> dict[str, str]:
    """The path of a package, and of the folder of libraries (NAME.libs) that its wheel installs next to it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    place = os.path.realpath(folders[0] if folders else (spec and spec.origin) or "")
    if spec is None or not (folders or os.path.isfile(place)):
        raise ConfigError(f"the sandbox needs the package {package!r}, which is not installed")
    libraries = f"{place}.libs"
    return {package: place} | ({f"{package}.libs": libraries} if os.path.isdir(libraries) else {})


def _check_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a file of a program has a relative name without '..', not {name!r}")
    return name


def _encode(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="replace")


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip().rpartition("\n")[2]
