"""Users' code that may ignore its cancellation: it swallows the `CancelledError`, or raises what ends a program.

Cancelling a task is a request. A task that goes on is abandoned after `GRACE_SECONDS`, so that it holds up neither the
episodes beside it nor the end of the run; with the process it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds a cancelled task may take to end."""

_abandoned: set[asyncio.Task[Any]] = set()
"""Abandoned tasks; the loop itself keeps no hold of tasks."""
_OVERRUN: ContextVar[asyncio.Future[bool] | None] = ContextVar("OVERRUN", default=None)
"""Set where a deadline around the running code has passed a while ago and the code goes on."""


class StillRunning(Exception):
    """Code went on after it was cancelled, and was abandoned."""


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a task of its own and return its result. Raises `StillRunning` where it goes on after a `Deadline`
    in it, or our own cancellation."""
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    token = _OVERRUN.set(over)
    task = asyncio.create_task(work)
    _OVERRUN.reset(token)

    def ended(task: asyncio.Task[T]) -> None:
        if not over.done():
            over.set_result(True)

    task.add_done_callback(ended)
    try:
        await over
    except asyncio.CancelledError:
        task.cancel()
        await wait_for_end({task})
        raise
    if not task.done():
        abandon(task)
        raise StillRunning
    return task.result()


def overrun_signal() -> asyncio.Future[bool] | None:
    """The future to set once the code that runs here is known to go on past its deadline."""
    return _OVERRUN.get()


async def wait_for_end(cancelled: set[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks, each until it has ended or its grace is over."""
    try:
        if cancelled:
            await asyncio.wait(cancelled, timeout=GRACE_SECONDS)
    finally:
        for task in cancelled:
            abandon(task)


def abandon(task: asyncio.Task[Any]) -> None:
    """Stop waiting for a task. One that has not ended is counted in `abandoned` until it does."""
    if not task.done():
        _abandoned.add(task)
    task.add_done_callback(_forget)


def abandoned() -> set[asyncio.Task[Any]]:
    """The abandoned tasks that have not ended since."""
    return set(_abandoned)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # known; nobody waits for it


def is_shutdown(error: BaseException) -> bool:
    """True where `error` ends the code that runs here. Otherwise users' code raised it: `SystemExit`, or the
    `CancelledError` of another task that it waited for, is then an error like any other."""
    if isinstance(error, asyncio.CancelledError):
        return is_being_cancelled()
    if isinstance(error, KeyboardInterrupt):  # a first Ctrl-C cancels, the next is raised wherever we are
        return any(task.cancelling() for task in asyncio.all_tasks())
    return isinstance(error, GeneratorExit)


def is_being_cancelled() -> bool:
    """True where the current task is cancelled, or its time is over. Otherwise a `CancelledError` is of another task
    that was waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
