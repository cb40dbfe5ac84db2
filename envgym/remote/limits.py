"""What a server bears."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import MAX_BODY


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's limits. Those of single clients are in the token file."""

    max_sessions: int = 10_000
    """Sessions open at once. Opening one more is answered with 429."""
    lease_seconds: float = 60.0
    """After this long without a request or a heartbeat a session is closed: its client is gone. An environment at
    work does not count as idle."""
    call_seconds: float = 600.0
    """How long an environment may take to answer one reset, to read one page of tasks or to judge one group. The
    limit of a step is the environment's own (`call_timeout`)."""
    body_seconds: float = 60.0
    """How long a request's body may take to arrive."""
    max_body: int = MAX_BODY
    """Bytes of the largest body."""
    drain_seconds: float = 20.0
    """How long sessions may go on once the server is asked to stop."""
