"""Users' code that may hang, crash or hold the interpreter, in processes of its own: those can be killed.

Threads cannot. In a process such code also has the main thread to itself (so timeouts by signal work), leaves the
random generators and the terminal of the run alone, and whatever it imports is not imported here.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envgym.errors import CallTimeout, InvalidOutcome, WorkerDied, WorkerError

from .local import LocalRuntime, LocalWorker

PING_SECONDS = 10.0
"""Seconds a process may take to give a sign of life, once a call in it had to be given up."""


class Processes:
    """`count` processes with an object of one class in each; `target` is `package.module:Class`.

    What the code prints goes to a file for each process in `logs`, or in a temporary folder that is kept only where
    something went wrong. `environ` is added to their environment before anything is imported there.
    """

    def __init__(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        count: int,
        name: str,
        logs: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._temporary = None if logs is not None else Path(tempfile.mkdtemp(prefix=f"envgym-{name}-"))
        runtime = LocalRuntime(logs or str(self._temporary))
        self._members = [Process(runtime, target, kwargs, f"{name}-{index}", environ) for index in range(count)]
        self._free: asyncio.Queue[Process] = asyncio.Queue()
        for process in self._members:
            self._free.put_nowait(process)
        self._giving_back: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all of them. Raises what the class's constructor raises; then nothing is left running."""
        starting = [asyncio.create_task(process.start()) for process in self._members]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await _cancel(starting)
            await self.close()
            raise

    async def call(self, method: str, *args: Any, timeout: float, tries: int = 1) -> Any:
        """Run a method on the first process that is free; one call at a time in each. `timeout` (seconds) counts from
        when it begins; then the process is killed and the next call finds a new one. A call that crashed is made again
        until it has had its `tries`: the process may have been killed for another's doing. See `Process.call`."""
        for _ in range(tries - 1):
            try:
                return await self._call(method, *args, timeout=timeout)
            except InvalidOutcome as failure:
                if failure.kind != "crash":
                    raise
        return await self._call(method, *args, timeout=timeout)

    async def _call(self, method: str, *args: Any, timeout: float) -> Any:
        process = await self._free.get()
        try:
            return await process.call(method, *args, timeout=timeout)
        finally:
            giving_back = asyncio.create_task(self._give_back(process))  # its caller need not wait for that
            self._giving_back.add(giving_back)
            giving_back.add_done_callback(self._giving_back.discard)

    async def session(self) -> Session:
        """A place for state in the process that holds the fewest."""
        process = min(self._members, key=lambda process: process.sessions)
        process.sessions += 1
        try:
            return Session(process, await process.restarted())
        except BaseException:
            process.sessions -= 1
            raise

    async def _give_back(self, process: Process) -> None:
        """Free a process again once it is of use: known to react, and started anew where it was killed."""
        try:
            await process.checked()
            await process.start()
        except WorkerError:
            pass  # whoever calls it next is told
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End them all. What they printed is kept where one failed."""
        await _cancel(self._giving_back)
        await asyncio.gather(*(process.close() for process in self._members))
        if self._temporary is not None and not any(process.failed for process in self._members):
            shutil.rmtree(self._temporary, ignore_errors=True)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended: one that was starting a process kills it first."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Process:
    """One of them. It is started when first called, and anew after it died or was killed."""

    def __init__(
        self,
        runtime: LocalRuntime,
        target: str,
        kwargs: Mapping[str, Any],
        name: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.sessions = 0
        self.failed = False
        self._runtime = runtime
        self._target = target
        self._kwargs = kwargs
        self._name = name
        self._environ = environ
        self._worker: LocalWorker | None = None
        self._starting = asyncio.Lock()
        self._checking: set[asyncio.Task[None]] = set()

    async def start(self) -> LocalWorker:
        async with self._starting:
            if self._worker is None:
                self.failed, failed = True, self.failed  # until it has started
                self._worker = await self._runtime.start(
                    self._target, self._kwargs, name=self._name, environ=self._environ
                )
                self.failed = failed
            return self._worker

    async def call(self, method: str, *args: Any, timeout: float | None = None, on: LocalWorker | None = None) -> Any:
        """Run a method there.

        Raises an `EnvgymError` of the method's as it is; any other exception and the process's death are
        `InvalidOutcome` of the kinds `environment` and `crash`. Past `timeout` seconds the process is killed and
        `CallTimeout` raised. Without one the caller keeps the time: when it gives up, the call is cancelled there, and
        the process killed should it not react. `on` is the incarnation that is meant.
        """
        worker = on or await self.restarted()
        deadline = asyncio.timeout(timeout)
        try:
            async with deadline:
                return await worker.call(method, *args)
        except TimeoutError:
            if not deadline.expired():
                raise
            await self._kill(worker)
            raise CallTimeout(f"{self._name}: {method} took longer than {timeout:g} s") from None
        except asyncio.CancelledError:
            if self._worker is worker and not self._checking:
                checking = asyncio.create_task(self._check(worker))
                self._checking.add(checking)
                checking.add_done_callback(self._checking.discard)
            raise
        except WorkerDied as error:
            self._forget(worker)
            raise InvalidOutcome("crash", str(error), retryable=True) from None
        except WorkerError as error:
            self.failed = True
            raise InvalidOutcome("environment", str(error)) from None

    async def restarted(self) -> LocalWorker:
        """The process, running. Where it does not start a second time that is a `crash`, and no end of the run."""
        try:
            return await self.start()
        except WorkerError as error:
            raise InvalidOutcome("crash", str(error), retryable=True) from None

    async def checked(self) -> None:
        """Wait until it is known whether the process still reacts, where that is in doubt."""
        if self._checking:
            await asyncio.wait(self._checking)

    async def close(self) -> None:
        for checking in list(self._checking):
            checking.cancel()
        if self._worker is not None:
            await self._worker.close()

    async def _check(self, worker: LocalWorker) -> None:
        """Kill a process that does not react any more."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await worker.call("__repr__")  # which every object has
        except TimeoutError:
            await self._kill(worker)
        except WorkerError:
            self._forget(worker)

    async def _kill(self, worker: LocalWorker) -> None:
        self._forget(worker)
        await worker.kill()

    def _forget(self, worker: LocalWorker) -> None:
        self.failed = True
        if self._worker is worker:
            self._worker = None


class Session:
    """State that lives in one process for an episode, and dies with it."""

    def __init__(self, process: Process, worker: LocalWorker) -> None:
        self._process = process
        self._worker = worker
        self._ended = False

    @property
    def alive(self) -> bool:
        return self._process._worker is self._worker

    async def call(self, method: str, *args: Any) -> Any:
        """Run a method where the state is; see `Process.call`. The caller keeps the time."""
        return await self._process.call(method, *args, on=self._worker)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._process.sessions -= 1
