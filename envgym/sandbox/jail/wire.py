"""Messages over a socket: a JSON object and pieces of bytes.

A message is the length of a JSON text, the text (`[object, sizes of the pieces]`), and the pieces.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct(">I")


def pack(header: dict[str, Any], pieces: Sequence[bytes] = ()) -> bytes:
    text = json.dumps([header, [len(piece) for piece in pieces]]).encode()
    return b"".join([LENGTH.pack(len(text)), text, *pieces])


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Wait for a header and its pieces. Raises `EOFError` where the other side hangs up before."""
    [length] = LENGTH.unpack(_receive_exactly(connection, LENGTH.size))
    header, sizes = json.loads(_receive_exactly(connection, length))
    return header, [_receive_exactly(connection, size) for size in sizes]


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises `EOFError` if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
