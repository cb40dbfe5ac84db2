"""Timeouts by SIGALRM outside the main thread.

Functions that users bring limit their time by `signal.alarm`, as math-verify does. Python allows that to the main
thread alone, and many functions take the error for a wrong answer. So every other thread gets an alarm of its own: a
timer that raises in the thread what the handler raises. As with a signal, a call into C returns first.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from envgym.limits import AlarmTimer


class _OfThread(threading.local):
    handler: Any = signal.SIG_DFL
    alarm: AlarmTimer | None = None


_state = _OfThread()
_of_main = {name: getattr(signal, name) for name in ("signal", "alarm", "setitimer")}


def install() -> None:
    """Let `signal`'s functions for SIGALRM work in every thread of this process; nothing else changes."""
    signal.signal, signal.alarm, signal.setitimer = _signal, _alarm, _setitimer


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal(signalnum: int, handler: Any) -> Any:
    if signalnum != signal.SIGALRM or _is_main():
        return _of_main["signal"](signalnum, handler)
    previous, _state.handler = _state.handler, handler
    return previous


def _alarm(seconds: int) -> Any:
    return _of_main["alarm"](seconds) if _is_main() else int(_setitimer(signal.ITIMER_REAL, seconds)[0])


def _setitimer(timer: int, seconds: float, interval: float = 0.0) -> Any:
    """Replace the thread's alarm; 0 seconds cancel it."""
    if timer != signal.ITIMER_REAL or _is_main():
        return _of_main["setitimer"](timer, seconds, interval)
    if _state.alarm is not None:
        _state.alarm.cancel()
    _state.alarm = None
    if seconds > 0 and callable(_state.handler):
        _state.alarm = AlarmTimer(seconds, _state.handler)
        _state.alarm.start()
    return 0.0, 0.0
