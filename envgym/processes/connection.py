"""Calls of a worker process over its wire: by the process that started it, and by others that reach it directly.

The wire carries pickles, so both of its ends must be processes of one user. The process that started a worker made a
socket pair with it; any other connects to the worker's abstract Unix socket (Linux), which leaves no file behind, and
each end asks the kernel whose process the other one is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envgym.errors import WorkerDied, WorkerError

from .child import START, Outbox, is_same_user, read_frame
from .runtime import Message, Worker, WorkerHandle, rebuild_error
from .watchdog import CallWatch


class Connection(WorkerHandle[Worker]):
    """Calls to a worker process, and their answers. `close` ends the connection, not the worker."""

    def __init__(
        self, name: str, log: Path, reader: asyncio.StreamReader, outbox: Outbox, watch: CallWatch | None = None
    ) -> None:
        self.name = name
        self.log = log
        self._call_watch = watch or CallWatch()
        self._reader = reader
        self._outbox = outbox
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._last_call = START
        self._end: WorkerError | None = None
        self._reading_to_end = asyncio.create_task(self._read_to_end())

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, or is being closed."""
        return self._end is not None

    async def send(self, message: Message) -> Any:
        if self._end is not None:
            raise self._end
        self._last_call += 1
        call = self._last_call
        self._outbox.post((call, *message))
        answer = self._expect(call)
        try:
            with self._call_watch.watching(f"{self.name}: {message[0]}"):
                return await answer
        except asyncio.CancelledError:
            if self._pending.pop(call, None) is not None:
                self._outbox.post((call, None, (), {}))
            raise

    def _expect(self, call: int) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call] = future
        return future

    async def _read(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            for call, error, result in frame:
                future = self._pending.pop(call, None)
                if future is None or future.done():
                    continue  # the call was cancelled
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(rebuild_error(error, self.name, self.log))

    def _fail(self, reason: WorkerError) -> None:
        self._end = self._end or reason
        for future in self._pending.values():
            if not future.done():
                future.set_exception(reason)
                future.exception()  # mark as retrieved: there may be no waiter
        self._pending.clear()

    async def _read_to_end(self) -> None:
        try:
            await self._read()
        finally:
            self._outbox.close()
            self._fail(WorkerDied(f"{self.name} has ended (log: {self.log})"))

    async def _close(self) -> None:
        self._fail(WorkerError(f"{self.name}: the connection has been closed"))
        self._outbox.close()
        await asyncio.wait({self._reading_to_end})


@dataclass(frozen=True, slots=True)
class LocalReference:
    """A worker process of this machine."""

    name: str
    log: Path
    address: str

    async def open(self) -> WorkerHandle[Any]:
        try:
            reader, writer = await asyncio.open_unix_connection(self.address)
        except OSError as error:
            raise WorkerDied(f"{self.name} cannot be reached ({error.strerror}; log: {self.log})") from None
        if not is_same_user(writer.get_extra_info("socket")):
            writer.close()
            raise WorkerDied(f"{self.name} has ended, and another user's process has its address")
        return Connection(self.name, self.log, reader, Outbox(writer))
