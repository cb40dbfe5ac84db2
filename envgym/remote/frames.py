"""Requests and answers over a WebSocket, many at once and each answered when it is done.

A binary message holds some of them: a line of JSON that lists their heads, and behind it their bodies, one after the
other. One with a large body is cut into pieces, so that others go between: messages that begin with `+`, the last one
with `.`. One follows the other whole. Each piece is answered with a pong: whoever sends for long hears that the other
end is there.

Requests are those of `routes`, and may be sent again like them, over another connection too. Either end may have made
the connection: a client that steps a server's sessions (`CHANNEL_PATH`), or a server that joins a trainer
(`JOIN_PATH`). The latter says `Hello` first, as a text message, and again with `leaving` once it takes no new sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from .arriving import Arriving
from .wire import MAX_BODY, VERSION, Wire

CHANNEL_PATH = "/v1/channel"
JOIN_PATH = "/v1/join"
FULL_MESSAGE, FULL_COUNT = 2**18, 16
"""Bytes and requests after which a message gets no further one: while one end reads it, the other fills the next. A
larger body is sent in pieces of so many bytes."""
MAX_MESSAGE = 4 * FULL_MESSAGE
"""Bytes of the largest message, with room to spare: one that is full but for a byte, another body, and their heads."""
MAX_WHOLE = MAX_BODY + 2**20
"""Bytes of the largest one that is sent in pieces: the largest body, and its head."""
CHANNEL_BODY = 2**20
"""Bytes of the largest body that a client sends over a channel: larger ones would hold up all others there."""
PING_SECONDS = 10.0
"""Both sides of a connection to a trainer ask so often whether the other is there; half of it without an answer ends
the connection."""
CHANNEL_PING_SECONDS = 30.0
"""The same of a channel. It is not how a server that stands still is told: its sessions' leases are (`leases`)."""
HELLO_SECONDS = 10.0
"""How long a server may take to say who it is."""

Method = Literal["GET", "POST", "DELETE"]
Length = Annotated[int, Field(ge=0)]


class Hello(Wire):
    """Who a server is: `instance` is drawn when its process starts, and known to nobody else."""

    version: int = VERSION
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    weight: float = Field(1.0, gt=0, le=1e6)
    leaving: bool = False


class Notice(Wire):
    """What the trainer has to say to whoever runs a server, as a text message: why it plays nothing there, say."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, or whoever stands before it. `retry_after` are seconds."""

    status: int
    content_type: str
    content: bytes
    retry_after: float = 1.0


AskHead = tuple[int, Method, str, Length]
"""A request's number, which is the connection's own, its method, its path with the query, and its body's length."""
AnswerHead = tuple[int, int, str, Length]
"""The number of the request that is answered, status, content type, and the body's length."""
ASKS: TypeAdapter[list[AskHead]] = TypeAdapter(list[AskHead])
ANSWERS: TypeAdapter[list[AnswerHead]] = TypeAdapter(list[AnswerHead])

H = TypeVar("H", AskHead, AnswerHead)

_MORE, _LAST = b"+", b"."


def pack(heads: TypeAdapter[list[H]], items: Sequence[tuple[H, bytes]]) -> bytes:
    """One message."""
    return b"".join([heads.dump_json([head for head, _ in items]), b"\n", *(body for _, body in items)])


def unpack(heads: TypeAdapter[list[H]], message: bytes) -> Iterator[tuple[H, bytes]]:
    """The heads and the bodies of a message. Raises `ValueError` for one that is none."""
    line, newline, _ = message.partition(b"\n")
    found = heads.validate_json(line, strict=True)
    end = len(line) + len(newline)
    if end + sum(head[3] for head in found) != len(message):
        raise ValueError("the bodies are not as long as their heads say")
    return _bodies(found, message, end)


def _bodies(heads: list[H], message: bytes, end: int) -> Iterator[tuple[H, bytes]]:
    for head in heads:
        begin, end = end, end + head[3]
        yield head, message[begin:end]


def cut(message: bytes) -> Iterator[bytes]:
    """The pieces of a large message."""
    rest = memoryview(message)
    while len(rest) > FULL_MESSAGE:
        yield b"".join([_MORE, rest[:FULL_MESSAGE]])
        rest = rest[FULL_MESSAGE:]
    yield b"".join([_LAST, rest])


def is_piece(message: bytes) -> bool:
    return message.startswith((_MORE, _LAST))


class Pieces:
    """Puts the pieces of a large message of at most `most` bytes together again."""

    def __init__(self, most: int = MAX_WHOLE) -> None:
        self._found = Arriving(most)

    def add(self, piece: bytes) -> bytes | None:
        """The message, once this was its last piece. Raises `ValueError` for one that is too large, and where too much
        arrives at once."""
        try:
            self._found.add(memoryview(piece)[1:])
        except (OverflowError, BufferError) as error:
            raise ValueError(f"the pieces are too many: {error}") from None
        return None if piece.startswith(_MORE) else self._found.whole()
