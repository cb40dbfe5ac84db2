"""Users' code that may ignore its cancellation: it swallows the `CancelledError`, or raises `SystemExit`.

Cancelling a task is a request. A task that continues is abandoned after `GRACE_SECONDS`, so that it delays neither
concurrent episodes nor the end of the run; it ends with the process.
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
"""References to the abandoned tasks, which the loop itself does not hold."""
OVERRUN: ContextVar[asyncio.Future[bool] | None] = ContextVar("OVERRUN", default=None)
"""Set once the running code has ignored its deadline for the grace period."""


class StillRunning(Exception):
    """Code ignored its cancellation and was abandoned."""


def start_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start a task that is in `tasks` until it ends; the event loop itself would not hold it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a separate task and return its result. Raises `StillRunning` if it ignores a `Deadline` in it or
    the cancellation of this call."""
    settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    token = OVERRUN.set(settled)
    task = asyncio.create_task(work)
    OVERRUN.reset(token)
    task.add_done_callback(lambda _: settle(settled))
    try:
        await settled
    except asyncio.CancelledError:
        task.cancel()
        await wait_for_end({task})
        raise
    if not task.done():
        abandon(task)
        raise StillRunning
    return task.result()


def settle(future: asyncio.Future[bool]) -> None:
    """Set the future to True, unless it is done."""
    if not future.done():
        future.set_result(True)


async def wait_for_end(cancelled: set[asyncio.Task[Any]]) -> None:
    """Wait for cancelled tasks, for `GRACE_SECONDS` at most; then abandon the others."""
    try:
        if cancelled:
            await asyncio.wait(cancelled, timeout=GRACE_SECONDS)
    finally:
        for task in cancelled:
            abandon(task)


def abandon(task: asyncio.Task[Any]) -> None:
    """Stop waiting for a task; until it ends it is one of the `abandoned_tasks`."""
    if not task.done():
        _abandoned.add(task)
    task.add_done_callback(_forget)


def abandoned_tasks() -> set[asyncio.Task[Any]]:
    """The abandoned tasks that are still running."""
    return set(_abandoned)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # else asyncio logs that it was never retrieved


def is_shutdown(error: BaseException) -> bool:
    """True if `error` ends the current task. Otherwise users' code raised it: its `SystemExit`, or the `CancelledError`
    of another task that it waited for, is an error like any other."""
    if isinstance(error, asyncio.CancelledError):
        return is_being_cancelled()
    if isinstance(error, KeyboardInterrupt):  # the first Ctrl-C cancels; the next is raised in any code
        return any(task.cancelling() for task in asyncio.all_tasks())
    return isinstance(error, GeneratorExit)


def is_being_cancelled() -> bool:
    """True if the current task is cancelled, or its time is over. Otherwise a `CancelledError` is that of another task
    that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
