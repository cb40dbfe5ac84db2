"""Timeouts by SIGALRM outside the main thread.

Functions that users bring limit their time by `signal.alarm`, as math-verify does. Python allows that to the main
thread alone, and many functions take the error for a wrong answer. So every other thread gets an alarm of its own: a
timer that raises in the thread what the handler raises. As with a signal, a call into C returns first.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any


class Alarm:
    """Raises in the thread that makes it what `handler` raises, after `seconds` unless cancelled."""

    def __init__(self, seconds: float, handler: Any) -> None:
        self._handler = handler
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, None)  # one that is raised, but not yet noticed
        self._timer.cancel()

    def _ring(self) -> None:
        try:
            self._handler(signal.SIGALRM, None)
        except BaseException as error:
            kind, args = type(error), error.args
            # Python raises a class in another thread, not an instance.
            raised = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *args)})
            with self._lock:
                if not self._is_cancelled:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(raised))


class _OfThread(threading.local):
    handler: Any = signal.SIG_DFL
    alarm: Alarm | None = None


_state = _OfThread()
_of_main = {name: getattr(signal, name) for name in ("signal", "alarm", "setitimer")}


def install() -> None:
    """Let `signal`'s functions for SIGALRM work in every thread of this process; nothing else changes."""
    for function in (_signal, _alarm, _setitimer):
        setattr(signal, function.__name__[1:], function)


def _is_ours(number: int = signal.SIGALRM) -> bool:
    return number == signal.SIGALRM and threading.current_thread() is not threading.main_thread()


def _signal(number: int, handler: Any) -> Any:
    if not _is_ours(number):
        return _of_main["signal"](number, handler)
    previous, _state.handler = _state.handler, handler
    return previous


def _alarm(seconds: int) -> Any:
    return _start(seconds) if _is_ours() else _of_main["alarm"](seconds)


def _setitimer(timer: int, seconds: float, interval: float = 0.0) -> Any:
    if timer != signal.ITIMER_REAL or not _is_ours():
        return _of_main["setitimer"](timer, seconds, interval)
    return float(_start(seconds)), 0.0


def _start(seconds: float) -> int:
    """Replace the thread's alarm; 0 seconds cancel it."""
    if _state.alarm is not None:
        _state.alarm.cancel()
    _state.alarm = Alarm(seconds, _state.handler) if seconds > 0 and callable(_state.handler) else None
    return 0
