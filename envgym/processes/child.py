"""The process side of the local runtime: `python -m envgym.processes.child FD PARENT` hosts one worker object.

The first message names the class and its arguments; every later one is a call. Methods run on this process's
event loop: plain ones immediately, coroutines as concurrent tasks. The process ends on request, when the socket
closes, and, by the kernel, when its parent dies.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from typing import Any

from .cancellation import is_shutdown
from .family import die_with
from .runtime import close_object, describe_error, load_target
from .watchdog import CallWatch, watched_thread

START = 0
"""Id of the answer to the first message: the constructor has returned."""


# ---------------------------------------------------------------------------------------------------------
# The wire: messages posted in one turn of the event loop are one frame, an 8-byte length and a pickled list of
# messages, each pickled on its own, so that one message that cannot be pickled fails alone. The wire joins processes of
# one user on one machine (a socket pair made before the worker starts), which is why pickle is safe here.

_LENGTH = struct.Struct("!Q")

FRAME_MESSAGES = 16
"""Messages per frame without `whole_turns`."""


class Outbox:
    """Collects messages and writes them in order, those of one turn of the event loop as one frame.

    With `whole_turns` the calls of one turn arrive at the worker together: none runs before all have arrived. Without,
    a frame is written every few messages, so that the worker starts before the last one arrives.
    """

    def __init__(self, writer: asyncio.StreamWriter, *, whole_turns: bool = True) -> None:
        self._writer = writer
        self._whole_turns = whole_turns
        self._messages: list[bytes] = []

    def post(self, message: Any) -> None:
        """Queue `message`. Raises pickle's error immediately if it cannot be pickled."""
        data = pickle.dumps(message, protocol=5)
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(data)
        if not self._whole_turns and len(self._messages) >= FRAME_MESSAGES:
            self.flush()

    def flush(self) -> None:
        if self._messages:
            body = pickle.dumps(self._messages, protocol=5)
            self._messages = []
            self._writer.write(_LENGTH.pack(len(body)))
            self._writer.write(body)

    def close(self) -> None:
        self._writer.close()


async def read_frame(reader: asyncio.StreamReader) -> list[Any] | None:
    """The messages of the next frame; None when the connection is closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return [pickle.loads(message) for message in pickle.loads(body)]


# ---------------------------------------------------------------------------------------------------------
# The worker


class Host:
    """One worker object and its running calls."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.worker: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._watch = CallWatch()

    def start(self, target: str, kwargs: dict[str, Any]) -> bool:
        try:
            self.worker = load_target(target)(**kwargs)
        except Exception as error:
            self._fail(START, error)
            return False
        # Objects made so far are permanent: without the freeze every full collection traverses all of them.
        gc.collect()
        gc.freeze()
        self._outbox.post((START, None, None))
        return True

    def run(self, call: int, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start one call; `method` None cancels it."""
        if method is None:
            if call in self._tasks:
                self._tasks[call].cancel()
            return
        try:
            with watched_thread(function := getattr(self.worker, method)):
                result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(self._finish(call, method, result))
                self._tasks[call] = task
                task.add_done_callback(lambda _: self._tasks.pop(call))
            else:
                self._outbox.post((call, None, result))
        except Exception as error:
            self._fail(call, error)

    async def _finish(self, call: int, method: str, result: Any) -> None:
        try:
            with self._watch.watching(method):
                self._outbox.post((call, None, await result))
        except BaseException as error:
            if isinstance(error, SystemExit | KeyboardInterrupt) or is_shutdown(error):
                raise
            self._fail(call, error)

    def _fail(self, call: int, error: BaseException) -> None:
        traceback.print_exception(error)
        self._outbox.post((call, describe_error(error), None))


async def serve(fd: int) -> int:
    """Host a worker for the process at the other end of the socket `fd`. Returns the exit status."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # a process that the worker starts must not keep it open
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    outbox = Outbox(writer)
    host = Host(outbox)
    first = await read_frame(reader)
    if first is None:
        return 1
    target, kwargs, sys.path[:] = first[0]
    if not host.start(target, kwargs):
        outbox.flush()
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        return 1
    while (frame := await read_frame(reader)) is not None:
        for message in frame:
            if message is None:
                await close_object(host.worker)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # the worker is closed; the exit handlers of its libraries take seconds
            host.run(*message)
    print("the controller is gone: ending", file=sys.stderr, flush=True)
    os._exit(1)  # without exit handlers: no running call has a recipient any more


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    faulthandler.enable()
    sys.exit(asyncio.run(serve(fd)))


if __name__ == "__main__":
    main()
