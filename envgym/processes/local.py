"""Workers as child processes of the controller, on this machine.

Each worker is a new interpreter (not a fork, which torch and vLLM do not survive). It communicates over a socket pair
and writes its output to a file of the run folder. See `child` for the wire format and the worker's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envgym.errors import WorkerDied, WorkerError

from . import family
from .child import LISTEN, START, Outbox
from .connection import Connection, LocalReference
from .runtime import CALL_SECONDS, UTF8, Worker
from .watchdog import CONTROLLER_LOG, CallWatch

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""The controller, engine and ranks share the cores, so waiting threads must sleep, but only after a fraction of a
millisecond of spinning: small models have thousands of parallel loops per step, and waking a thread for each made a
learner's step twice as long."""
START_TIMEOUT = 300.0
"""Seconds without progress that a worker's constructor may take: imports and loading a model from a slow disk may take
much longer."""
CLOSE_TIMEOUT = 10.0
"""Seconds a worker may take to close, and again after SIGTERM, before it is killed."""


class LocalWorker(Connection[Worker]):
    """The controller's end of one worker process, which `close` ends. Made by `LocalRuntime.start`."""

    def __init__(
        self, name: str, log: Path, process: Process, reader: asyncio.StreamReader, outbox: Outbox, watch: CallWatch
    ) -> None:
        super().__init__(name, log, reader, outbox, watch)
        self.pid = process.pid
        self._process = process

    async def start(self, target: str, kwargs: Mapping[str, Any]) -> None:
        """Build the worker object in the process; raises what its constructor raised."""
        start_answer = self._expect(START)
        # Pickled by themselves, since they may be of modules on this path.
        self._outbox.post((target, pickle.dumps(dict(kwargs), protocol=5), sys.path))
        progress, end = self._progress(), time.monotonic() + CALL_SECONDS
        while not (await asyncio.wait({start_answer}, timeout=START_TIMEOUT))[0]:
            previous, progress = progress, self._progress()
            if progress == previous:
                raise TimeoutError(f"made no progress for {START_TIMEOUT:.0f} s")
            if time.monotonic() > end:
                raise TimeoutError(f"has been starting for {CALL_SECONDS:.0f} s")
        await start_answer

    def _progress(self) -> tuple[int, int, int]:
        """Numbers that grow while the process works: bytes of its log, MiB that it has read, and its processor time, in
        hundredths of `START_TIMEOUT`. Zeros for one that has ended."""
        folder = Path("/proc", str(self.pid))
        try:
            ticks = sum(map(int, family.stat(self.pid)[11:13]))
            n_read = int((folder / "io").read_text(encoding="utf-8").split()[1])
            n_logged = self.log.stat().st_size
        except OSError:
            return 0, 0, 0
        return n_logged, n_read >> 20, int(100 * ticks / os.sysconf("SC_CLK_TCK") / START_TIMEOUT)

    async def reference(self) -> LocalReference:
        return LocalReference(self.name, self.log, await self.send((LISTEN, (), {})))

    async def kill(self) -> None:
        """Kill the process."""
        self._signal(signal.SIGKILL)
        await asyncio.wait({self._reading_to_end})  # a caller that is cancelled must not cancel the reader

    async def _close(self) -> None:
        if self._end is None:
            self._fail(WorkerError(f"{self.name}: the worker has been closed"))
            self._outbox.post(None)
        for stop_signal in (signal.SIGTERM, signal.SIGKILL):
            exited, _ = await asyncio.wait({self._reading_to_end}, timeout=CLOSE_TIMEOUT)
            if exited:
                return
            self._signal(stop_signal)
        await self._reading_to_end

    async def _read_to_end(self) -> None:
        """Read answers until the process ends, then fail the pending calls."""
        reading = asyncio.create_task(self._read())
        ending = asyncio.create_task(self._process.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and reading.exception() is not None:
            self._signal(signal.SIGKILL)  # its answers cannot be read
        status = await ending
        await asyncio.wait({reading}, timeout=1.0)  # deliver the answers sent before its end
        reading.cancel()
        self._signal(signal.SIGKILL)  # the rest of its process group
        self._outbox.close()
        self._fail(WorkerDied(f"{self.name} {_describe_status(status)} (log: {self.log}{_last_line(self.log)})"))

    def _signal(self, number: signal.Signals) -> None:
        """Signal the worker's process group: the worker and the processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class LocalRuntime:
    """Starts workers as child processes whose output goes to `log_dir/NAME.log`.

    With `deterministic`, calls made in one turn of the event loop start in the worker together.

    Start workers from the main thread: the kernel kills them with the thread that started them.
    """

    def __init__(self, log_dir: Path | str, *, deterministic: bool = True) -> None:
        self._log_dir = Path(log_dir)
        self._watch = CallWatch(self._log_dir / CONTROLLER_LOG)
        self._deterministic = deterministic
        self._spawning: list[asyncio.Task[LocalWorker[Any]]] = []

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> LocalWorker[Any]:
        spawning = asyncio.create_task(self._spawn(name, environ or {}))
        self._spawning.append(spawning)
        worker = await asyncio.shield(spawning)  # else nothing would own a half-started process; `close` ends it
        try:
            await worker.start(target, kwargs)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                log = f"log: {worker.log}{_last_line(worker.log)}"
                raise WorkerError(f"{name} is not ready, and {error} ({log})") from None
            raise
        return worker

    async def close(self) -> None:
        spawned = await asyncio.gather(*self._spawning, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in spawned if isinstance(worker, LocalWorker)))

    async def _spawn(self, name: str, environ: Mapping[str, str]) -> LocalWorker[Any]:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        parent_end, child_end = socket.socketpair()
        with child_end, log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-u", "-m", "envgym.processes.child", str(child_end.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**WAITING, **os.environ, **UTF8, "PATH": search_path(), **environ},
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=parent_end)
        return LocalWorker(name, log, process, reader, Outbox(writer, whole_turns=self._deterministic), self._watch)


def search_path() -> str:
    """`PATH` with the interpreter's programs first: DeepSpeed builds kernels by a `ninja` that an environment which is
    not activated hides."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            line = family.last_line(file.fileno()).strip()
    except OSError:  # the run folder has been removed; report the death without a last line
        return ""
    return f", last line: {line[:300]}" if line else ""
