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
from .cancellation import abandoned, wait_for_end
from .watch import LoopWatch, end_at_once

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but that what would stop the loop in a task of users' code (`sys.exit()`) is raised where that
    task is awaited, and that tasks and threads which do not end when asked to are left behind.

    Ctrl-C and SIGTERM cancel `main`; a second one is raised wherever the program is. Raises `EnvgymError` where `main`
    itself ends in a `SystemExit`.
    """
    loop = asyncio.new_event_loop()
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    loop.set_default_executor(threads)
    try:
        asyncio.set_event_loop(loop)
        task = loop.create_task(main)
        with LoopWatch(loop):
            try:
                with _CtrlC(task) as ctrl_c:
                    return _complete(loop, task)
            except asyncio.CancelledError:
                if ctrl_c.count:
                    raise KeyboardInterrupt from None
                raise
            except SystemExit as error:
                raise EnvgymError(_exited(error)) from error
            finally:
                _end_all(loop)
    finally:
        try:
            ending = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True}, daemon=True)
            ending.start()
            ending.join(cancellation.GRACE_SECONDS)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio raises these out of the loop whichever task they come from. The loop can go on, and its task
            # holds the exception for whoever awaits it. Once that is being cancelled, Ctrl-C means all of it.
            if task.done() or (isinstance(error, KeyboardInterrupt) and task.cancelling()):
                raise


class _CtrlC:
    """Does what asyncio does at Ctrl-C also at SIGTERM, and counts both."""

    USUAL: ClassVar[dict[signal.Signals, Any]] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.count = 0

    def __enter__(self) -> _CtrlC:
        if threading.current_thread() is threading.main_thread():
            for number, usual in self.USUAL.items():
                if signal.getsignal(number) is usual:
                    signal.signal(number, self._pressed)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, usual in self.USUAL.items():
            if signal.getsignal(number) == self._pressed:
                signal.signal(number, usual)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or self._task.done():
            end_at_once()
            raise KeyboardInterrupt
        self._task.cancel()
        self._task.get_loop().call_soon_threadsafe(lambda: None)  # it may be asleep


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs, for as long as that helps."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        if not task.cancelling():  # a second time would interrupt one that is cleaning up
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        _complete_quietly(loop, wait_for_end(tasks))
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler({"message": "raised while the loop ends", "exception": error, "task": task})
    _complete_quietly(loop, _generators_end(loop))
    for task in abandoned():
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is known, and was said


async def _generators_end(loop: asyncio.AbstractEventLoop) -> None:
    closing = asyncio.ensure_future(loop.shutdown_asyncgens())
    await wait_for_end({closing})


def _complete_quietly(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    task = loop.create_task(work)
    while not task.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(task)


def _exited(error: SystemExit) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"something that was called ended the program: SystemExit: {error}{where}"
