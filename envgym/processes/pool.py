"""Separate processes for users' code that may hang, crash or block the interpreter: they can be killed, threads cannot.

In its own process such code also has the main thread to itself (so timeouts by signal work), does not touch the run's
random generators and terminal, and imports nothing into the run's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic

from envgym.errors import CallTimeout, EnvgymError, InvalidOutcome, WorkerDied, WorkerError

from .cancellation import cancel_all, start_task
from .local import LocalRuntime, LocalWorker
from .runtime import Message, Result, Worker, WorkerHandle, message_of

PING_SECONDS = 10.0
"""Seconds a process may take to answer a ping after a cancelled call."""
PING: Message = ("__repr__", (), {})
"""A call that every object answers."""


class Processes(Generic[Worker]):
    """`count` processes with an object of one class in each; `target` is `package.module:Class`. Each takes `calls`
    calls at a time.

    Their output goes to one file per process in `logs`, or in a temporary folder that is deleted if nothing fails.
    `environ` is added to their environment before any import.
    """

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        count: int,
        calls: int = 1,
        name: str,
        logs: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._temporary = None if logs is not None else Path(tempfile.mkdtemp(prefix=f"envgym-{name}-"))
        self._runtime = LocalRuntime(logs or str(self._temporary))
        start = partial(self._runtime.start, target, kwargs, environ=environ)
        self._processes = [Process(f"{name}-{index}", start) for index in range(count)]
        self._idle: asyncio.Queue[Process] = asyncio.Queue()
        for process in self._processes * calls:
            self._idle.put_nowait(process)
        self._giving_back: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the processes that do not run. Raises the error of the class's constructor, after closing them all."""
        starting = [asyncio.create_task(process.start()) for process in self._processes]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await cancel_all(starting)  # a task that was starting a process kills it first
            await self.close()
            raise

    def call(
        self, call: Callable[[Worker], Awaitable[Result]], *, timeout: float, tries: int = 1
    ) -> Coroutine[Any, Any, Result]:
        """Run a coroutine method on the first process that can take a call; see `WorkerHandle.call` for `call`, and
        `Process.send`. `timeout` (seconds) counts from the start of the method; then the process is killed, and
        replaced for the next call. A crashed call is retried up to `tries` tries in all: another program's memory use
        may have killed the process."""
        return self._send(message_of(call), timeout, tries)

    def run(self, call: Callable[[Worker], Result], *, timeout: float, tries: int = 1) -> Coroutine[Any, Any, Result]:
        """`call` for a plain method."""
        return self._send(message_of(call), timeout, tries)

    async def _send(self, message: Message, timeout: float, tries: int) -> Any:
        while True:
            tries -= 1
            process = await self._idle.get()
            try:
                return await process.send(message, timeout=timeout)
            except InvalidOutcome as failure:
                if failure.kind != "crash" or not tries:
                    raise
            finally:
                start_task(self._give_back(process), self._giving_back)  # the caller need not wait

    async def session(self) -> ProcessSession[Worker]:
        """A session in the process with the fewest sessions."""
        process = min(self._processes, key=lambda process: process.sessions)
        process.sessions += 1
        try:
            await process.wait_for_check()
            return ProcessSession(process, await process.restart())
        except BaseException:
            process.sessions -= 1
            raise

    async def _give_back(self, process: Process) -> None:
        """Free a process once it is known to respond, restarted if it was killed."""
        try:
            await process.wait_for_check()
            await process.start()
        except WorkerError:
            pass  # the next call raises it
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Close all processes. The temporary logs stay if one failed."""
        await cancel_all(self._giving_back)
        await asyncio.gather(*(process.close() for process in self._processes))
        await self._runtime.close()  # processes whose start was cancelled
        if self._temporary is not None and not any(process.failed for process in self._processes):
            shutil.rmtree(self._temporary, ignore_errors=True)


class Process:
    """One process of the pool. `start` starts it at the first call, and again after it died or was killed."""

    def __init__(self, name: str, start: Callable[..., Awaitable[LocalWorker[Any]]]) -> None:
        self.sessions = 0
        self.failed = False
        self._name = name
        self._start = start
        self._worker: LocalWorker[Any] | None = None
        self._starting = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> LocalWorker[Any]:
        async with self._starting:
            if self._worker is None:
                try:
                    self._worker = await self._start(name=self._name)
                except Exception:
                    self.failed = True
                    raise
            return self._worker

    async def send(
        self, message: Message, *, timeout: float | None = None, worker: LocalWorker[Any] | None = None
    ) -> Any:
        """Run a method in the process.

        Raises the method's own `EnvgymError` (a `WorkerDied` is of a process that the method called); any other
        exception and the process's death are `InvalidOutcome` of the kinds `environment` and `crash`. After `timeout`
        seconds the process is killed and `CallTimeout` raised. Without a timeout the caller may cancel: then the call
        is cancelled in the process, which is killed if it does not respond. `worker` selects one incarnation of the
        process.
        """
        worker = worker or await self.restart()
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await worker.send(message)
        except TimeoutError:
            if not deadline.expired():
                raise
            await self._kill(worker)
            raise CallTimeout(f"{self._name}: {message[0]} took longer than {timeout:g} s") from None
        except asyncio.CancelledError:
            if self._worker is worker and (self._checking is None or self._checking.done()):
                self._checking = asyncio.create_task(self._check(worker))
            raise
        except WorkerDied as error:
            if not worker.has_ended:
                raise  # of another process, an engine say, which the method called
            self._forget(worker)
            raise InvalidOutcome("crash", str(error), retryable=True) from None
        except WorkerError as error:
            self.failed = True
            raise InvalidOutcome("environment", str(error)) from None

    async def restart(self) -> LocalWorker[Any]:
        """The running process, started if necessary. A failed start is a `crash`, which does not end the run."""
        try:
            return await self.start()
        except WorkerError as error:
            raise InvalidOutcome("crash", str(error), retryable=True) from None

    async def wait_for_check(self) -> None:
        """Wait for the end of a running health check."""
        if self._checking is not None:
            await asyncio.wait({self._checking})

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        if self._worker is not None:
            await self._worker.close()

    async def _check(self, worker: LocalWorker[Any]) -> None:
        """Kill a process that does not respond."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await worker.send(PING)
        except TimeoutError:
            await self._kill(worker)
        except WorkerError:
            self._forget(worker)

    async def _kill(self, worker: LocalWorker[Any]) -> None:
        self._forget(worker)
        await worker.kill()

    def _forget(self, worker: LocalWorker[Any]) -> None:
        self.failed = True
        if self._worker is worker:
            self._worker = None


class ProcessSession(WorkerHandle[Worker]):
    """State in one process for the duration of an episode; it is lost if the process ends. Calls have no timeout; see
    `Process.send`."""

    def __init__(self, process: Process, worker: LocalWorker[Worker]) -> None:
        self._process = process
        self._worker = worker
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self._worker.pid

    @property
    def alive(self) -> bool:
        return self._process._worker is self._worker

    async def send(self, message: Message) -> Any:
        return await self._process.send(message, worker=self._worker)

    async def wait_for_check(self) -> None:
        """Wait until it is known whether the process still responds after a cancelled call."""
        await self._process.wait_for_check()

    async def close(self, end: Callable[[], Awaitable[object]] | None = None) -> None:
        """End the session, with a last call if the process is alive. A process that has died has no state left, so
        errors are ignored."""
        try:
            if end is not None and self.alive:
                with contextlib.suppress(EnvgymError):
                    await end()
        finally:
            self._process.sessions -= not self._is_closed
            self._is_closed = True
