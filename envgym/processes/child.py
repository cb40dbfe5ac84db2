"""The process side of the local runtime: `python -m envgym.processes.child FD PARENT` hosts one worker object.

The first message names the class and its arguments; every later one is a call for the `Host`, or cancels one. The
process ends on request, when the socket closes, and, by the kernel, when its parent dies.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
from functools import partial
from typing import Any

from .family import die_with
from .host import Answer, Host

START = 0
"""Id of the answer to the first message: the constructor has returned."""
LISTEN = "<listen>"
"""The method of a message to the process itself: other processes will call its worker."""


# ---------------------------------------------------------------------------------------------------------
# The wire: messages posted in one turn of the event loop are one frame, an 8-byte length and the messages, each pickled
# on its own, so that one message that cannot be pickled fails alone. A message is the number of its parts, their
# lengths, and the parts: its pickle, and the bytes that are no part of that, so that nothing copies them
# (`pickle.PickleBuffer`). The wire joins processes of one user on one machine (a socket pair made before the worker
# starts, or a socket that asks whose its peer is), which is why pickle is safe here.

_LENGTH = struct.Struct("!Q")
Part = bytes | memoryview
MOST_JOINED = 2**16
"""Bytes of a frame up to which copying its parts costs less than writing each."""

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
        self._messages: list[list[Part]] = []

    def post(self, message: Any) -> None:
        """Queue `message`. Raises pickle's error immediately if it cannot be pickled."""
        parts = message_parts(message)
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(parts)
        if not self._whole_turns and len(self._messages) >= FRAME_MESSAGES:
            self.flush()

    def flush(self) -> None:
        messages, self._messages = self._messages, []
        body = list[Part]()
        for parts in messages:
            body += [struct.pack(f"!{len(parts) + 1}Q", len(parts), *map(len, parts)), *parts]
        length = sum(map(len, body))
        if length > MOST_JOINED:
            for part in [_LENGTH.pack(length), *body]:
                self._writer.write(part)
        elif messages:
            self._writer.write(b"".join([_LENGTH.pack(length), *body]))

    def close(self) -> None:
        self._writer.close()


async def read_frame(reader: asyncio.StreamReader) -> list[Any] | None:
    """The messages of the next frame; None when the connection is closed."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = memoryview(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    messages, end = list[Any](), 0
    while end < length:
        (count,) = _LENGTH.unpack_from(body, end)
        sizes = struct.unpack_from(f"!{count}Q", body, end + _LENGTH.size)
        *starts, end = itertools.accumulate(sizes, initial=end + _LENGTH.size * (count + 1))
        first, *buffers = [body[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        messages.append(pickle.loads(first, buffers=buffers))
    return messages


def message_parts(message: Any) -> list[Part]:
    """The pickle of a message, and the buffers that are apart from it: those that nobody may change. Arrays are part of
    the pickle, since their receiver may change them."""
    parts: list[Part] = [b""]

    def is_inside(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.readonly:
            parts.append(data)
        return not data.readonly

    parts[0] = pickle.dumps(message, protocol=5, buffer_callback=is_inside)
    return parts


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a socket's peer: Linux's `struct ucred`."""


def is_same_user(connection: Any) -> bool:
    """True if the process at the other end of a Unix socket belongs to this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


class Caller:
    """A process that calls the worker of a `Host`."""

    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self.outbox = Outbox(writer)
        self._host = host

    def post(self, number: int, answer: Answer) -> None:
        self.outbox.post((number, *answer))

    def run(self, number: int, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a method, or with None cancel a call."""
        if method is None:
            self._host.cancel((self, number))
        else:
            self._host.run((self, number), method, args, kwargs, partial(self.post, number))

    def end(self) -> None:
        """Cancel its calls: there is nobody for their answers."""
        self._host.cancel_all(self)
        self.outbox.close()


class CallerSocket:
    """Lets other processes of this user call the worker, at an abstract Unix socket (Linux), which leaves no file."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._address = ""
        self._starting: asyncio.Task[Any] | None = None

    def listen(self) -> str:
        """The socket's address, where it listens from now on."""
        if self._starting is None:
            self._address = f"\0envgym-{secrets.token_hex(16)}"
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(self._address)
            listening.listen()
            self._starting = asyncio.create_task(asyncio.start_unix_server(self._serve, sock=listening))
        return self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = Caller(self._host, writer)
        try:
            while is_same_user(writer.get_extra_info("socket")) and (frame := await read_frame(reader)) is not None:
                for message in frame:
                    caller.run(*message)
        finally:
            caller.end()


async def serve(fd: int) -> int:
    """Host a worker for the process at the other end of the socket `fd`. Returns the exit status."""
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)  # a process that the worker starts must not keep it open
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    host = Host()
    controller, callers = Caller(host, writer), CallerSocket(host)

    first = await read_frame(reader)
    if first is None:
        return 1
    target, kwargs, sys.path[:] = first[0]
    controller.post(START, host.start(target, pickle.loads(kwargs)))  # the controller kills a process that has failed
    while (frame := await read_frame(reader)) is not None:
        for message in frame:
            if message is None:
                await host.close()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)  # the worker is closed; the exit handlers of its libraries take seconds
            if message[1] == LISTEN:
                controller.post(message[0], (None, callers.listen()))
            else:
                controller.run(*message)
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
