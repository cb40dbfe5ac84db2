"""The controller's interface to its workers, wherever they run.

A worker is an ordinary class. A runtime starts it somewhere (a process on this machine, an actor on Ray, or
inline for debugging) and hands back a handle whose `call` runs a method there. Methods may be coroutines;
calls made together are started in the order they were made.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from envgym import errors
from envgym.errors import EnvgymError, WorkerError
from envgym.loading import users_line

UTF8 = {"PYTHONUTF8": "1"}
"""Variables of workers: what libraries read in the locale's encoding is UTF-8, whatever the locale is."""
CALL_SECONDS = 3600.0
"""Seconds a call to a worker may take at most; new weights take longest. A rank that waits for another one that will
never come ends here at the latest."""


class WorkerHandle(Protocol):
    """A worker that runs somewhere."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the worker and return its result.

        Raises `WorkerError` (one line, and where the rest is logged) when the method raised, `WorkerDied` when
        the process is gone.
        """

    async def close(self) -> None:
        """End the worker, politely first, then by force. Safe to call twice and after its death."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a worker: the number of its machine, which of that machine's GPUs, and how much of each."""

    node: int = 0
    gpus: tuple[int, ...] = ()
    share: float = 1.0


class Runtime(Protocol):
    """Starts workers."""

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> WorkerHandle:
        """Start `target` (`package.module:Class`) with `kwargs`; returns once its constructor has returned.

        `name` is for people and log files; `environ` is added to the worker's environment before it imports
        anything.
        """

    async def close(self) -> None:
        """Close every worker that was started."""


# ---------------------------------------------------------------------------------------------------------
# What every runtime does to a worker object


def load_target(target: str) -> Any:
    """Import `package.module:Class`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


Described = tuple[str, str, dict[str, Any]]
"""An exception as it crosses the wire, without unpickling foreign classes: the name of the nearest class in
`envgym.errors` (empty where it is not ours), a one-line message, and the other fields of an `InvalidOutcome`."""


def describe_error(error: BaseException) -> Described:
    """The exception in a form that `rebuilt_error` reads."""
    if isinstance(error, errors.EnvgymError):
        ours = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        if isinstance(error, errors.InvalidOutcome):
            return ours, str(error), {"kind": error.kind, "retryable": error.retryable}
        return ours, str(error), {}
    where = f" ({own})" if (own := users_line(error)) else ""
    return "", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ") + where, {}


def rebuilt_error(described: Described, name: str, log: Path) -> errors.EnvgymError:
    """The exception, or a `WorkerError` of the worker called `name` where it was not ours."""
    ours, message, more = described
    if not ours:
        return errors.WorkerError(f"{name}: {message} (log: {log})")
    if more:
        return errors.InvalidOutcome(message=message, **more)
    found: type[errors.EnvgymError] = getattr(errors, ours)
    return found(message)


async def close_object(worker: Any) -> None:
    """Call the object's `close`, plain or coroutine, if it has one."""
    close = getattr(worker, "close", None)
    result = close() if close else None
    if inspect.isawaitable(result):
        await result


# ---------------------------------------------------------------------------------------------------------
# Workers in the controller's own process, for `debug=true`: a breakpoint inside a worker works


class InlineWorker:
    """A worker object behind the interface of a worker process."""

    def __init__(self, name: str, worker: Any) -> None:
        self.name = name
        self._worker = worker
        self._closed = False

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise WorkerError(f"{self.name}: the worker has been closed")
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except EnvgymError:
            raise
        except Exception as error:
            raise WorkerError(f"{self.name}: {describe_error(error)[1]}") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await close_object(self._worker)


class InlineRuntime:
    """Builds workers here. A worker that blocks (a training step) blocks the controller meanwhile."""

    def __init__(self) -> None:
        self._workers: list[InlineWorker] = []

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> InlineWorker:
        """Build the worker. `environ` is set in this process, and stays."""
        os.environ.update(environ or {})
        try:
            worker = InlineWorker(name, load_target(target)(**kwargs))
        except EnvgymError:
            raise
        except Exception as error:
            raise WorkerError(f"{name}: {describe_error(error)[1]}") from error
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()
