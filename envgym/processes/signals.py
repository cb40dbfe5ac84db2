"""Signal handlers of a run, wherever it runs: Python delivers signals to the main thread alone.

In a notebook, and in every program that has an event loop, the run has a thread of its own, for which the caller waits
(`run_in_thread`). The waiting thread gets Ctrl-C, and calls the handlers that the run has set.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
POLL_SECONDS = 0.5
_waiting_handlers: ContextVar[dict[int, Any] | None] = ContextVar("_waiting_handlers", default=None)
"""In the thread of `run_in_thread`: the handlers that the waiting thread calls, by signal."""


def set_handlers(handlers: Mapping[int, Any]) -> dict[int, Any]:
    """Set signal handlers and return the previous ones. Other threads than the main one get the signals that
    `run_in_thread` passes on, or none."""
    waiting = _waiting_handlers.get()
    if waiting is not None:
        previous = {number: get_handler(number) for number in handlers}
        waiting.update(handlers)
        return previous
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def get_handler(number: int) -> Any:
    """The handler of a signal, for `set_handlers`."""
    waiting = _waiting_handlers.get()
    return signal.getsignal(number) if waiting is None else waiting.get(number, signal.default_int_handler)


def run_in_thread(call: Callable[[], T]) -> T:
    """Call a function in a new thread and wait for it. Meanwhile Ctrl-C calls the handler that the function has set; if
    that raises `KeyboardInterrupt`, so does the code that the function runs."""
    handlers: dict[int, Any] = {}
    context, result = copy_context(), Future[T]()
    context.run(_waiting_handlers.set, handlers)

    def target() -> None:
        try:
            result.set_result(context.run(call))
        except BaseException as error:
            result.set_exception(error)

    def pass_on(number: int, frame: FrameType | None) -> None:
        try:
            handlers.get(number, signal.default_int_handler)(number, frame)
        except KeyboardInterrupt:
            interrupt(thread.ident or 0)

    thread = threading.Thread(target=target, name="envgym run", daemon=True)
    previous = set_handlers({signal.SIGINT: pass_on})
    try:
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)  # `_thread.interrupt_main` does not end a longer wait
    finally:
        set_handlers(previous)
    return result.result()


def interrupt(thread: int) -> None:
    """Raise `KeyboardInterrupt` in the Python code that a thread runs, by the thread's identifier."""
    if thread == threading.main_thread().ident:
        signal.pthread_kill(thread, signal.SIGINT)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
