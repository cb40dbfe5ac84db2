"""Users' code that may take no notice of its end: it swallows the cancellation, or raises what ends a program.

Cancelling a task is asking it. One that has been asked and goes on is left to itself after `GRACE_SECONDS`, so that it
holds up neither the episodes beside it nor the end of the run; with the process it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long what was cancelled may take to end."""

_left: set[asyncio.Task[Any]] = set()
"""What was left to itself; the loop itself keeps no hold of tasks."""
_IGNORED: ContextVar[asyncio.Future[bool] | None] = ContextVar("IGNORED", default=None)
"""Told where a deadline around the running code has passed a while ago and the code goes on."""


class Unheeded(Exception):
    """Something went on after it was cancelled, and was left to itself."""


async def heeded(work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to, in a task of its own. Raises `Unheeded` where a `Deadline` in it, or our own cancellation,
    is not heeded."""
    over: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    token = _IGNORED.set(over)
    job = asyncio.create_task(work)
    _IGNORED.reset(token)

    def ended(job: asyncio.Task[T]) -> None:
        if not over.done():
            over.set_result(True)

    job.add_done_callback(ended)
    try:
        await over
    except asyncio.CancelledError:
        job.cancel()
        await end({job})
        raise
    if not job.done():
        leave(job)
        raise Unheeded
    return job.result()


def ignored() -> asyncio.Future[bool] | None:
    """What to set once the code that runs here is known to go on past its deadline."""
    return _IGNORED.get()


async def end(cancelled: set[asyncio.Task[Any]]) -> None:
    """Wait for tasks that were cancelled, each until it has ended or its grace is over."""
    try:
        if cancelled:
            await asyncio.wait(cancelled, timeout=GRACE_SECONDS)
    finally:
        for job in cancelled:
            leave(job)


def leave(job: asyncio.Task[Any]) -> None:
    """Leave a task to itself, if it has not ended: nobody need wait for it any more."""
    if not job.done():
        _left.add(job)
    job.add_done_callback(_forget)


def left() -> set[asyncio.Task[Any]]:
    """The tasks that were left to themselves and have not ended since."""
    return set(_left)


def _forget(job: asyncio.Task[Any]) -> None:
    _left.discard(job)
    if not job.cancelled():
        job.exception()  # known; nobody waits for it


def ends_us(error: BaseException) -> bool:
    """Whether `error` is the end of what runs here. Else users' code raised it: `SystemExit`, or the `CancelledError`
    of another task that it waited for, is then an error like any other."""
    if isinstance(error, asyncio.CancelledError):
        return is_being_cancelled()
    if isinstance(error, KeyboardInterrupt):  # a first Ctrl-C cancels, the next is raised wherever we are
        return any(task.cancelling() for task in asyncio.all_tasks())
    return isinstance(error, GeneratorExit)


def is_being_cancelled() -> bool:
    """Whether somebody cancels the current task, or its time is over. Without that, a `CancelledError` is of another
    task that was waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
