"""The side of the training process: another framework's interpreter, started once, and the episodes that it runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envgym.agents.external import passed_environment
from envgym.errors import ConfigError, InvalidOutcome
from envgym.processes import family

from . import fork_server

MAX_LINE = 2**28
"""Maximum bytes of an answer."""
END_SECONDS = fork_server.GRACE_SECONDS + 10.0
"""Seconds that ended calls, and the interpreter, may take to end."""
LOG_LINES = 50
"""Lines of the framework's output that are remembered for messages."""


class ForeignInterpreter:
    """Runs episodes in the interpreter `python` by the file `worker` (see `fork_server`), which is started by `start`,
    and again by the next `run` if it has died.

    The interpreter inherits the environment variables that external programs do, and those in `environ`.
    """

    def __init__(
        self,
        name: str,
        package: str,
        python: Path,
        worker: Path,
        settings: Mapping[str, Any],
        environ: Sequence[str] = (),
    ) -> None:
        self.name = name
        """The framework's name, for messages."""
        self._package = package
        self._python = python
        self._worker = worker
        self._settings = dict(settings)
        self._environ = tuple(environ)
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""
        self._reading: list[asyncio.Task[None]] = []
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._log: deque[str] = deque(maxlen=LOG_LINES)

    async def start(self) -> dict[str, Any]:
        """Start the interpreter, and return what the worker's `load` returned.

        Raises `ConfigError` if the interpreter cannot be run, or `load` reports a mistake of the user.
        """
        self._folder = tempfile.mkdtemp(prefix="envgym-")
        pipe = asyncio.subprocess.PIPE
        # -P: modules beside fork_server.py must not stand in for the framework's.
        files = (family.__file__, self._package, self._worker, self._folder)
        environ = passed_environment(self._environ)
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._python, "-P", fork_server.__file__, str(os.getpid()), *files,
                stdin=pipe, stdout=pipe, stderr=pipe, env=environ, start_new_session=True, limit=MAX_LINE,
            )  # fmt: skip
        except OSError as error:
            shutil.rmtree(self._folder)
            raise ConfigError(f"{self._python} cannot be run: {error.strerror}; set env.python") from None
        self._reading = [asyncio.create_task(self._read_log(self._process))]
        self._send(self._settings)
        try:
            answer = await self._read_answer(self._process)
        except BaseException:
            await self.close()
            raise
        if "loaded" in answer:
            self._reading.append(asyncio.create_task(self._read_answers(self._process)))
            return dict(answer["loaded"])
        await self.close()
        reason = answer.get("mistake") or f"its interpreter ended: {self._last_line()}"
        raise ConfigError(f"{self.name}: {reason}")

    async def run(self, call: Mapping[str, Any], seconds: float | None) -> dict[str, Any]:
        """The result of a call, which has `seconds`, if given. When this returns or raises, its processes have ended;
        if it is cancelled, they end soon after.

        Raises `InvalidOutcome` (`agent`) if it took longer, or if the interpreter died.
        """
        async with self._lock:
            if self._process is None or self._reading[-1].done():  # it has died
                await self.close()
                await self.start()
        id, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self._answers[id] = answer
        self._send({"id": id, "call": dict(call)})
        try:
            async with asyncio.timeout(seconds):
                result = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._send({"id": id})
            raise
        except TimeoutError:
            self._send({"id": id})
            await asyncio.wait([answer], timeout=END_SECONDS)
            message = f"{self.name}: the episode took longer than {seconds} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        if result is None:
            message = f"{self.name}: its interpreter ended: {self._last_line()}"
            raise InvalidOutcome("agent", message, retryable=True)
        return dict(result)

    async def close(self) -> None:
        """End the interpreter and all calls."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        waiting = asyncio.create_task(process.wait())
        await asyncio.wait([waiting], timeout=END_SECONDS)
        if not waiting.done():
            process.kill()
        await asyncio.wait([waiting, *self._reading], timeout=END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)  # the server removes it, unless it was killed

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """The next answer; empty at the end of the stream."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        while answer := await self._read_answer(process):
            self._answers.pop(answer["id"]).set_result(answer["result"])
        while self._answers:
            self._answers.popitem()[1].set_result(None)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            self._log.append(line.decode(errors="replace").rstrip())

    def _last_line(self) -> str:
        return next((line[:300] for line in reversed(self._log) if line.strip()), "it printed nothing")
