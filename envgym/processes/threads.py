"""A dedicated thread for an environment with blocking methods, so that it never blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class DedicatedThread:
    """Runs calls one after the other on one daemon thread, started at the first call.

    One thread per instance, not a pool: a hanging call blocks its own thread only, libraries that tie state to a thread
    (databases, renderers) see one, and the process can end while a call hangs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unfinished = 0

    @property
    def busy(self) -> bool:
        """True while a call has not returned."""
        return self._unfinished > 0

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` on the thread and return its result; a coroutine function gets an event loop there."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        returns, context = _returns_to(loop), contextvars.copy_context()

        def job() -> None:
            error: BaseException | None = None
            result = None
            try:
                result = context.run(_run, function, *args, **kwargs)
            except BaseException as raised:  # also SystemExit: user code must not end the thread
                error = raised
            self._unfinished -= 1
            returns.put(future, result, error)

        self._unfinished += 1
        self._put(job)
        return await future

    def submit(self, function: Callable[[], Any]) -> None:
        """Run `function` after the pending calls; its result and errors are ignored."""

        def job() -> None:
            with contextlib.suppress(BaseException):
                _run(function)

        self._put(job)

    def end(self) -> None:
        """End the thread after its pending calls. A later call starts another."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread, self._jobs = None, queue.SimpleQueue()

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


class Returns:
    """Results of threads on their way to one event loop. One wake-up delivers all results so far: waking the loop is a
    system call that releases the interpreter lock, and with a thousand threads that adds up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._items: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._woken = False

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Settle `future` in its loop. Callable from any thread."""
        self._items.append((future, result, error))
        loop = self._loop()
        if not self._woken and loop is not None:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no waiter
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that a result that arrives meanwhile wakes the loop again
        while self._items:
            _settle(*self._items.popleft())


_returns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Returns] = weakref.WeakKeyDictionary()


def _returns_to(loop: asyncio.AbstractEventLoop) -> Returns:
    if loop not in _returns:
        _returns[loop] = Returns(loop)
    return _returns[loop]


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # its deadline has passed
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future must not hold it: it would end the loop
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
