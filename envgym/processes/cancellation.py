"""The boundary to users' code: its errors, its cancellation, and a deadline that pauses while it waits for a service.

Cancelling a task is a request, which code may ignore: it swallows the `CancelledError`, or raises `SystemExit`. A task
that continues is abandoned after `GRACE_SECONDS`, so that it delays neither concurrent episodes nor the end of the run;
it ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar, Token
from typing import Any, TypeVar

from envgym.errors import CallTimeout

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


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_to_end(work: Coroutine[Any, Any, T], seconds: float, name: str, *passing: type[BaseException]) -> T:
    """The result of users' code, which runs in a separate task. Raises its error, whatever that is; `CallTimeout` if it
    takes longer than `seconds`, even if it ended in another way when cancelled; `StillRunning` if it ignores that, or
    the cancellation of this call. Errors of the classes `passing` are raised also after that time."""
    settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    deadline, caught = Deadline(seconds, name), UsersCode(*passing)  # a task's `SystemExit` would end the event loop
    results: list[T] = []

    async def run() -> None:
        with caught:
            async with deadline:
                results.append(await work)

    token = OVERRUN.set(settled)
    task = asyncio.create_task(run())
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
    task.result()  # raises an error that passed
    if deadline.expired():
        raise CallTimeout(f"{name} took longer than {seconds:g} s")
    if not results:
        raise caught.error
    return results[0]


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


class UsersCode:
    """Context manager around users' code: `with UsersCode() as call:`.

    It catches every exception, `SystemExit` included, and stores it in `call.error`. Two kinds pass: errors of the
    classes `passing`, and shutdown (a cancellation of the surrounding task, Ctrl-C).
    """

    error: BaseException
    """The error that ended the block; unset if there was none."""

    def __init__(self, *passing: type[BaseException]) -> None:
        self._passing = passing

    def __enter__(self) -> UsersCode:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or isinstance(error, self._passing) or is_shutdown(error):
            return False
        self.error = error
        return True


class _Clock:
    """What `pause_timeouts` stops (`report(True)`) and starts again; pauses may overlap."""

    _pauses = 0

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._pauses += 1
        if self._pauses == 1:
            self._report(True)
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._report(False)


class Deadline(_Clock):
    """`async with Deadline(seconds)`: like `asyncio.timeout`, but `pause_timeouts` stops the clock, in the block and in
    tasks created there, and `run_to_end` is notified of work that ignores it. Enter it once."""

    # Of the class, since the thread that watches the loop may look at a deadline that is being made.
    _is_overrun = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, seconds: float, name: str = "") -> None:
        self.seconds = seconds
        self.name = name
        """The subject of messages about it."""
        self._timeout = asyncio.timeout(None)
        self._seconds_left = seconds
        self._token: Token[tuple[_Clock, ...]] | None = None

    async def __aenter__(self) -> Deadline:
        self._loop = asyncio.get_running_loop()
        self._overrun = OVERRUN.get()
        await self._timeout.__aenter__()
        self._token = _ENCLOSING.set((*_ENCLOSING.get(), self))
        self._set_timer()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        assert self._token is not None
        _ENCLOSING.reset(self._token)
        self._token = None
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(*exc)

    def expired(self) -> bool:
        return self._timeout.expired() or self._is_overrun

    def expire_if_overrun(self) -> bool:
        """Count as expired if its time is over but its timer cannot fire, because the running code blocks the loop.
        Returns whether it does. Callable from any thread."""
        if self._pauses == 0 and self._timer is not None and self._timer.when() < self._loop.time():
            self._is_overrun = True
        return self._is_overrun

    def expire(self) -> None:
        """Expire now."""
        if self._can_expire():
            if self._timer is not None:
                self._timer.cancel()
            self._fire()

    def _set_timer(self) -> None:
        self._timer = self._loop.call_later(self._seconds_left, self._fire)

    def _fire(self) -> None:
        self._timeout.reschedule(self._loop.time())
        if self._overrun is not None:
            self._timer = self._loop.call_later(GRACE_SECONDS, settle, self._overrun)

    def _report(self, is_paused: bool) -> None:
        if not self._can_expire():
            return
        if not is_paused:
            self._set_timer()
        elif self._timer is not None:
            self._seconds_left = self._timer.when() - self._loop.time()
            self._timer.cancel()
            if self._seconds_left <= 0:  # the timer was about to fire
                self._fire()

    def _can_expire(self) -> bool:
        """True while it is entered and not over: a shared request may outlive the episode that made it."""
        return self._token is not None and self._timeout.when() is None and asyncio.get_running_loop() is self._loop


async def call_in_time(call: Awaitable[T], seconds: float, name: str) -> T:
    """The result of a call. Raises `CallTimeout` if it takes longer, even if it returned a result when cancelled."""
    deadline = Deadline(seconds, name)
    try:
        async with deadline:
            result = await call
        if not deadline.expired():
            return result
    except TimeoutError:
        if not deadline.expired():
            raise  # the call's own
    raise CallTimeout(f"{name} took longer than {seconds:g} s")


_ENCLOSING: ContextVar[tuple[_Clock, ...]] = ContextVar("ENCLOSING", default=())
"""The deadlines around the running code."""


@contextlib.contextmanager
def pause_timeouts() -> Iterator[None]:
    """Stop the clocks of all enclosing deadlines, for example while rate-limited."""
    with contextlib.ExitStack() as stack:
        for deadline in _ENCLOSING.get():
            stack.enter_context(deadline._paused())
        yield


@contextlib.contextmanager
def report_pauses(report: Callable[[bool], None]) -> Iterator[None]:
    """In its body, `report` is called with True when the clocks of enclosing deadlines stop, and with False when they
    start again: the caller is another process with deadlines."""
    token = _ENCLOSING.set((*_ENCLOSING.get(), _Clock(report)))
    try:
        yield
    finally:
        _ENCLOSING.reset(token)
