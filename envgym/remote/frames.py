"""What a server that joined and its trainer send each other over their one connection, a WebSocket.

The server dials out and says `Hello`; from then on the trainer sends requests and the server answers, each in a binary
message: a line of JSON (`Ask` or `Answered`) and the body behind it. Requests are those of `routes`, and may be sent
again like them, over another connection of the same server too. A text message of the server is a `Hello` again: with
`leaving`, it takes no new sessions from now on.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from .wire import MAX_BODY, VERSION, Wire

JOIN_PATH = "/v1/join"
MAX_MESSAGE = MAX_BODY + 2**16
"""Bytes of the largest message: a body and its line."""
PING_SECONDS = 10.0
"""Both sides ask so often whether the other is there; half of it without an answer ends the connection."""
HELLO_SECONDS = 10.0
"""How long a server may take to say who it is."""

M = TypeVar("M", bound=Wire)


class Hello(Wire):
    """Who a server is: `instance` is drawn when its process starts, and known to nobody else."""

    version: int = VERSION
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    weight: float = Field(1.0, gt=0, le=1e6)
    leaving: bool = False


class Ask(Wire):
    """A request: its path with the query. `number` is the connection's own."""

    number: int
    method: Literal["GET", "POST", "DELETE"]
    target: str


class Answered(Wire):
    """The answer to the request of that `number`."""

    number: int
    status: int
    content_type: str


def pack(head: Wire, body: bytes) -> bytes:
    """One message."""
    return head.model_dump_json().encode() + b"\n" + body


def unpack(model: type[M], message: bytes) -> tuple[M, bytes]:
    """The line and the body of a message. Raises `ValueError` for one that is none."""
    head, _, body = message.partition(b"\n")
    return model.model_validate_json(head, strict=True), body
