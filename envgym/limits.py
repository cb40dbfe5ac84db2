"""Limits of time and memory for work that a stranger's data decides on: a template, a schema."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Iterator
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
_limiting = threading.RLock()
"""Threads would restore one another's limit of memory, and an alarm's thread could not start within it."""


class AlarmTimer(threading.Timer):
    """Calls `handler` after `seconds`, unless cancelled, and raises its error in the thread that made the timer."""

    def __init__(self, seconds: float, handler: Any) -> None:
        super().__init__(seconds, self._ring, [handler])
        self.daemon = True
        self._interrupted = ctypes.c_ulong(threading.get_ident())
        self._cancelling = threading.Lock()

    def cancel(self) -> None:
        with self._cancelling:
            super().cancel()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._interrupted, None)  # one that is not yet noticed

    def _ring(self, handler: Any) -> None:
        try:
            handler(signal.SIGALRM, None)
        except BaseException as error:
            kind, args = type(error), error.args
            # Python raises a class in another thread, not an instance.
            raised = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *args)})
            with self._cancelling:
                if not self.finished.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._interrupted, ctypes.py_object(raised))


@contextlib.contextmanager
def limits(seconds: float, n_bytes: int) -> Iterator[None]:
    """Context manager: raises `TimeoutError` in the block after `seconds`, or where the block would make this process
    take `n_bytes` more memory than at its beginning. The block is Python code: a call into C returns before it is timed
    out."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} s")

    with _limiting, contextlib.ExitStack() as stack:
        # A signal also ends a regular expression. It is repeated, since Jinja drops errors in constant expressions.
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, ring))
            stack.callback(signal.setitimer, signal.ITIMER_REAL, *signal.setitimer(signal.ITIMER_REAL, seconds, 1.0))
        else:
            alarm = AlarmTimer(seconds, ring)
            stack.callback(alarm.cancel)
            alarm.start()
        with contextlib.suppress(FileNotFoundError):  # only Linux limits addresses
            with open("/proc/self/statm", "rb", buffering=0) as file:  # every prompt comes here: no slower reading
                in_use = int(file.read(100).split()[0]) * PAGE
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            if soft == resource.RLIM_INFINITY or soft > in_use + n_bytes:
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
                resource.setrlimit(resource.RLIMIT_AS, (in_use + n_bytes, hard))
        try:
            yield
        except MemoryError:
            raise TimeoutError(f"it took more than {n_bytes >> 20} MiB") from None
