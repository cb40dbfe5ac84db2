"""The side of the training process: another framework's interpreter, started once, and the episodes that it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envgym.agents.external import passed_environment
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes import family

from . import fork_server

END_SECONDS = fork_server.GRACE_SECONDS + 10.0
"""Seconds that ended calls, and the interpreter, may take to end."""
LOG_BYTES = 10_000
"""Bytes of the framework's last output that are remembered for messages."""


@dataclass(slots=True)
class ForeignInterpreter:
    """Runs episodes in the interpreter `python` by the file `worker` (see `fork_server`), which is started by `start`,
    and again by the next `run` if it has died.

    The interpreter inherits the environment variables that external programs do, and those in `environ`.
    """

    name: str
    """The framework's name, for messages."""
    package: str
    """Its package and version."""
    python: Path
    worker: Path
    settings: Mapping[str, Any]
    environ: Sequence[str] = ()

    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _process: asyncio.subprocess.Process | None = None
    _control: socket.socket = field(init=False)
    _folder: str = ""
    _log: bytes = b""
    _reading: asyncio.Task[None] = field(init=False)

    async def start(self) -> dict[str, Any]:
        """Start the interpreter, and return what the worker's `load` returned.

        Raises `ConfigError` if the interpreter cannot be run, or `load` reports a mistake of the user.
        """
        self._folder = tempfile.mkdtemp(prefix="envgym-")
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: modules beside fork_server.py must not stand in for the framework's.
        words = ("-P", fork_server.__file__, family.__file__, self.package, self.worker, self._folder)
        environ, pipe = passed_environment(self.environ), asyncio.subprocess.PIPE
        try:
            with control:
                self._process = await asyncio.create_subprocess_exec(
                    self.python, *words, stdin=control.fileno(), stdout=pipe, stderr=asyncio.subprocess.STDOUT,
                    env=environ, start_new_session=True,
                )  # fmt: skip
        except BaseException as error:
            self._control.close()
            fork_server.remove(self._folder)
            if not isinstance(error, OSError):
                raise
            raise ConfigError(f"{self.python} cannot be run: {error.strerror}; set env.python") from None
        self._reading = asyncio.create_task(self._read_log(self._process))
        answer: dict[str, Any] = {}
        try:
            answer = await self._ask(self.settings, None)
        finally:
            if "loaded" not in answer:
                await self.close()
        if "loaded" not in answer:
            reason = answer.get("mistake") or f"its interpreter ended: {self._last_line()}"
            raise ConfigError(f"{self.name}: {reason}")
        return dict(answer["loaded"])

    async def run(self, call: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """The result of a call, which has `seconds`, if given. When this returns or raises, its processes have ended;
        if it is cancelled, they end soon after.

        Raises `InvalidOutcome` (`agent`) if it took longer, or if the interpreter died.
        """
        async with self._lock:
            if self._process is None or self._reading.done():  # it has died
                await self.close()
                await self.start()
        try:
            result = await self._ask(call, seconds)
        except TimeoutError:
            message = f"{self.name}: the episode took longer than {seconds} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        if not result:
            await asyncio.wait([self._reading], timeout=1)  # for its last output
            message = f"{self.name}: its interpreter ended: {self._last_line()}"
            raise InvalidOutcome("agent", message, retryable=True)
        return result

    async def close(self) -> None:
        """End the interpreter, once its calls have ended."""
        process, self._process = self._process, None
        if process is None:
            return
        self._control.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.wait([self._reading], timeout=END_SECONDS)
        await asyncio.to_thread(fork_server.remove, self._folder)  # if the server was killed

    async def _ask(self, request: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """The answer to a request, which has `seconds`, if given; empty if its process has died. Raises `TimeoutError`
        once its processes have ended."""
        connection, end = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with end:
                socket.send_fds(self._control, [b"."], [end.fileno()])
            writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(seconds):
                return dict(json.loads(await reader.read()))
        except TimeoutError:
            writer.write_eof()  # which ends the call
            await asyncio.wait([asyncio.create_task(reader.read())], timeout=END_SECONDS)
            raise
        except (OSError, ValueError):  # without an answer, or in the middle of it
            return {}
        finally:
            writer.close()

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while output := await process.stdout.read(2**16):
            self._log = (self._log + output)[-LOG_BYTES:]

    def _last_line(self) -> str:
        lines = self._log.decode(errors="replace").split("\n")
        return next((line[:300] for line in reversed(lines) if line.strip()), "it printed nothing")
