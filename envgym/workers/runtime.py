"""How the controller reaches its workers, wherever they run.

A worker is an ordinary class. A runtime starts it somewhere (a process on this machine, an actor on Ray, or
inline for debugging) and hands back a handle whose `call` runs a method there. Methods may be coroutines;
calls made together are started in the order they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

CALL_SECONDS = 3600.0
"""Seconds a call to a worker may take at most; new weights take longest. A rank that waits for another one that will
never come ends here at the latest."""


class WorkerHandle(Protocol):
    """A worker that runs somewhere."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the worker and return its result.

        Raises `WorkerError` (one line, and where the rest is logged) when the method raised, `WorkerDied` when
        the process is gone.
        """
        ...

    async def close(self) -> None:
        """End the worker, politely first, then by force. Safe to call twice and after its death."""
        ...


class Runtime(Protocol):
    """Starts workers."""

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> WorkerHandle:
        """Start `target` (`package.module:Class`) with `kwargs`; returns once its constructor has returned.

        `name` is for people and log files; `environ` is added to the worker's environment before it imports
        anything.
        """
        ...

    async def close(self) -> None:
        """Close every worker that was started."""
        ...
