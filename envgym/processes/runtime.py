"""The controller's interface to its workers, independent of where they run.

A worker is an ordinary class. A runtime starts it (in a process on this machine, as an actor on Ray, or inline for
debugging) and returns a handle, by which methods are called as on the object itself:

    handle: WorkerHandle[Adder] = await runtime.start("adders:Adder", {}, name="adder")
    total = await handle.run(lambda adder: adder.add(2, 3))

Type checkers and editors see the worker's class in the lambda, whose module the controller need not import. `run` is
for plain methods, `call` for coroutines. Concurrent calls are started in the order they were made.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from envgym import errors
from envgym.errors import EnvgymError, WorkerError
from envgym.loading import user_line

UTF8 = {"PYTHONUTF8": "1"}
"""Environment of workers: libraries that read files in the locale's encoding read UTF-8."""
CALL_SECONDS = 3600.0
"""Maximum duration of a call to a worker, in seconds; new weights take longest. It also ends a rank that waits forever
for a lost peer."""


Worker = TypeVar("Worker")
Result = TypeVar("Result")
Args = ParamSpec("Args")
Message = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call on the wire: the method's name, and its arguments."""


class StandIn:
    """In place of a worker: its methods return the message of their call."""

    def __getattr__(self, method: str) -> Callable[..., Message]:
        return lambda *args, **kwargs: (method, args, kwargs)


STAND_IN = StandIn()


def message_of(call: Callable[Concatenate[Worker, Args], object], *args: Args.args, **kwargs: Args.kwargs) -> Message:
    """The message of the method that `call(worker, *args, **kwargs)` calls."""
    return cast(Message, call(cast(Worker, STAND_IN), *args, **kwargs))


class WorkerHandle(ABC, Generic[Worker]):
    """A handle to a running worker."""

    _closing: asyncio.Task[None] | None = None

    def call(self, call: Callable[[Worker], Awaitable[Result]]) -> Coroutine[Any, Any, Result]:
        """Run the coroutine method of the worker that `call` calls, and return its result.

        `call` is evaluated at once with a stand-in for the worker, and may do nothing but this call. So it may use the
        variables of a loop (`noqa: B023`).

        Raises `WorkerError` (one line with the path of the log) if the method raised, `WorkerDied` if the process
        is gone.
        """
        return self.send(message_of(call))

    def run(self, call: Callable[[Worker], Result]) -> Coroutine[Any, Any, Result]:
        """`call` for a plain method, which holds everything else in the worker up."""
        return self.send(message_of(call))

    @abstractmethod
    async def send(self, message: Message) -> Any:
        """Run the method of a message; see `call`."""

    async def close(self) -> None:
        """End the worker: ask, then terminate, then kill. Safe to call twice and after its death."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        """`close`, called once."""

    async def kill(self) -> None:
        """End the worker at once: its calls raise `WorkerDied`."""
        raise NotImplementedError

    async def reference(self) -> Reference:
        """The worker as another process can reach it. Equal ones are of one worker."""
        raise NotImplementedError


class Reference(Protocol):
    """A worker that another process has started. It can be pickled."""

    async def open(self) -> WorkerHandle[Any]:
        """A handle, whose `close` ends nothing but itself. Raises `WorkerDied` if the worker is gone."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Resources of a worker: its node's number, GPUs of that node, and the share of each GPU."""

    node: int = 0
    gpus: tuple[int, ...] = ()
    share: float = 1.0


class Runtime(Protocol):
    """Starts workers."""

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> WorkerHandle[Any]:
        """Start `target` (`package.module:Class`) with `kwargs`; returns once its constructor has returned.

        `name` is for messages and log files; `environ` is added to the worker's environment before any import.
        """

    async def close(self) -> None:
        """Close all started workers."""


# ---------------------------------------------------------------------------------------------------------
# Helpers of every runtime


def load_target(target: str) -> Any:
    """Import `package.module:Class`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


ErrorRecord = tuple[str, str, dict[str, Any]]
"""An exception on the wire, without unpickling foreign classes: the name of its nearest class in `envgym.errors` (empty
for other errors), a one-line message, and the other fields of an `InvalidOutcome`."""


def describe_error(error: BaseException) -> ErrorRecord:
    """Convert an exception to the form that `rebuild_error` reads."""
    if isinstance(error, errors.EnvgymError):
        class_name = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        if isinstance(error, errors.InvalidOutcome):
            return class_name, str(error), {"kind": error.kind, "retryable": error.retryable}
        return class_name, str(error), {}
    location = f" ({line})" if (line := user_line(error)) else ""
    return "", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}".removesuffix(": ") + location, {}


def rebuild_error(record: ErrorRecord, name: str, log: Path) -> errors.EnvgymError:
    """The described exception; for one of another package, a `WorkerError` of the worker `name`."""
    class_name, message, fields = record
    if not class_name:
        return errors.WorkerError(f"{name}: {message} (log: {log})")
    if fields:
        return errors.InvalidOutcome(message=message, **fields)
    error_class: type[errors.EnvgymError] = getattr(errors, class_name)
    return error_class(message)


async def close_object(worker: Any) -> None:
    """Call the object's `close`, if any, plain or coroutine."""
    close = getattr(worker, "close", None)
    result = close() if close else None
    if inspect.isawaitable(result):
        await result


# ---------------------------------------------------------------------------------------------------------
# Workers in the controller's own process, for `debug=true`, so that breakpoints in a worker work


class InlineWorker(WorkerHandle[Any]):
    """A worker object with the interface of a worker process."""

    def __init__(self, name: str, worker: Any) -> None:
        self.name = name
        self._worker = worker

    async def send(self, message: Message) -> Any:
        if self._closing is not None:
            raise WorkerError(f"{self.name}: the worker has been closed")
        method, args, kwargs = message
        try:
            result = getattr(self._worker, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except EnvgymError:
            raise
        except Exception as error:
            raise WorkerError(f"{self.name}: {describe_error(error)[1]}") from error

    async def _close(self) -> None:
        await close_object(self._worker)


class InlineRuntime:
    """Builds workers in this process. A blocking worker (a training step) blocks the controller meanwhile."""

    def __init__(self) -> None:
        self._workers: list[InlineWorker] = []

    async def start(
        self, target: str, kwargs: Mapping[str, Any], *, name: str, environ: Mapping[str, str] | None = None
    ) -> InlineWorker:
        """Build the worker. `environ` is set in this process permanently."""
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
        async with AsyncExitStack() as stack:  # closes all of them, also after one that cannot be closed
            for worker in reversed(self._workers):
                stack.push_async_callback(worker.close)
