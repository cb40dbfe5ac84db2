"""The wire between the controller and a worker process: what is posted in one turn of the loop is one frame.

A frame is an 8-byte length and a pickled list of messages, each pickled on its own, so that one message that
cannot be pickled fails alone. The wire joins processes of one user on one machine (a socket pair made before
the worker starts), which is why pickle is safe here.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


FEW = 16
"""Messages after which a frame is written where the turn need not be waited for."""


class Outbox:
    """Collects messages and writes them in frames, in order: those of one turn of the event loop as one.

    With `whole_turns` a wave of calls reaches the worker whole: none of it runs there before all of it has arrived.
    Without, a frame is written every few messages, so that the worker begins while there is more to come.
    """

    def __init__(self, writer: asyncio.StreamWriter, *, whole_turns: bool = True) -> None:
        self._writer = writer
        self._whole_turns = whole_turns
        self._messages: list[bytes] = []

    def post(self, message: Any) -> None:
        """Queue `message`. Raises what pickle raises, at once, where it cannot be pickled."""
        data = pickle.dumps(message, protocol=5)
        if not self._messages:
            asyncio.get_running_loop().call_soon(self.flush)
        self._messages.append(data)
        if not self._whole_turns and len(self._messages) >= FEW:
            self.flush()

    def flush(self) -> None:
        if self._messages:
            body = pickle.dumps(self._messages, protocol=5)
            self._messages = []
            self._writer.write(_LENGTH.pack(len(body)))
            self._writer.write(body)


async def read_frame(reader: asyncio.StreamReader) -> list[Any] | None:
    """The messages of the next frame; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return [pickle.loads(message) for message in pickle.loads(body)]
