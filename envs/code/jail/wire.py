"""Messages over a socket: a JSON object and pieces of bytes, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

LENGTHS = struct.Struct(">II")
"""Bytes of the object, and how many pieces follow."""
LENGTH = struct.Struct(">I")


def pack(header: dict[str, Any], pieces: Sequence[bytes] = ()) -> bytes:
    text = json.dumps(header).encode()
    parts = [LENGTHS.pack(len(text), len(pieces)), text]
    for piece in pieces:
        parts += [LENGTH.pack(len(piece)), piece]
    return b"".join(parts)


def header(text: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(text)
    return read


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Wait for a header and its pieces. Raises `EOFError` where the other side hangs up before."""
    length, count = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    read = header(_exactly(connection, length))
    return read, [_exactly(connection, LENGTH.unpack(_exactly(connection, LENGTH.size))[0]) for _ in range(count)]


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
