"""The event loop of a command that calls users' code: only the command and its user end it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, ClassVar, TypeVar

from envgym.errors import EnvgymError

from . import cancellation
from .cancellation import abandoned_tasks, wait_for_end
from .signals import get_handler, run_in_thread, set_handlers
from .watch import LoopWatch, end_immediately

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, with three differences: a `SystemExit` in a task of users' code is raised where that task is
    awaited and does not stop the loop; tasks and threads that do not end when cancelled are abandoned; and where an
    event loop is running (a notebook, an asynchronous program), `main` has another one in a thread of its own.

    Ctrl-C and SIGTERM cancel `main`; a second one is raised in the running code. Raises `EnvgymError` if `main` itself
    ends in a `SystemExit`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    return run_in_thread(lambda: _run(main))


async def in_loop(loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, T]) -> T:
    """Await `call` in the event loop that it belongs to, from any loop and thread."""
    if asyncio.get_running_loop() is loop:
        return await call
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, loop))


def _run(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.new_event_loop()
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_default_executor(threads)
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main)
        ctrl_c = _CtrlC(task)
        with LoopWatch(loop):
            try:
                with ctrl_c:
                    return _run_until_complete(loop, task)
            except asyncio.CancelledError:
                if ctrl_c.count:
                    raise KeyboardInterrupt from None
                raise
            except SystemExit as error:
                raise EnvgymError(_describe_exit(error)) from error
            finally:
                _end_all(loop)
                ctrl_c.restore_handlers()  # a task that has ended only now may have restored ours
    finally:
        try:
            ending = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True}, daemon=True)
            ending.start()
            ending.join(cancellation.GRACE_SECONDS)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _run_until_complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio raises these out of the loop, from any task. The loop can continue, and the task holds the error
            # for the code that awaits it. Once `task` is being cancelled, Ctrl-C ends everything.
            if task.done() or (isinstance(error, KeyboardInterrupt) and task.cancelling()):
                raise


class _CtrlC:
    """Handles SIGTERM as asyncio handles Ctrl-C, and counts both."""

    DEFAULT_HANDLERS: ClassVar[dict[signal.Signals, Any]] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.count = 0

    def __enter__(self) -> _CtrlC:
        for number, handler in self.DEFAULT_HANDLERS.items():
            if get_handler(number) is handler:
                set_handlers({number: self._pressed})
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore_handlers()

    def restore_handlers(self) -> None:
        """Restore the handlers that were in place before, where this object's are."""
        for number, handler in self.DEFAULT_HANDLERS.items():
            if get_handler(number) == self._pressed:
                set_handlers({number: handler})

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or self._task.done():
            end_immediately()
            raise KeyboardInterrupt
        self._task.cancel()
        self._task.get_loop().call_soon_threadsafe(lambda: None)  # wake the loop


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks, and wait for them for the grace period."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        if not task.cancelling():  # a second cancellation would interrupt its clean-up
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        _run_quietly(loop, wait_for_end(tasks))
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler({"message": "raised while the loop ends", "exception": error, "task": task})
    _run_quietly(loop, wait_for_end({loop.create_task(loop.shutdown_asyncgens())}))
    for task in abandoned_tasks():
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # already reported


def _run_quietly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    task = loop.create_task(work)
    while not task.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(task)


def _describe_exit(error: SystemExit) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"the called code ended the program: SystemExit: {error}{location}"
