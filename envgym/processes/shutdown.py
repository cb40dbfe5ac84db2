"""The end of the program, also if an environment has left threads, tasks or processes that would delay it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from .family import descendants, stat

PATIENCE_SECONDS = 10.0
"""Seconds for which threads of users' code may delay the end of the program."""
TERM_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL for remaining processes."""
MARK = "ENVGYM_COMMAND"
"""The environment variable that marks all processes of a command, also after they were reparented."""


class Shutdown:
    """The handler of the program's exit. Create it first: exit handlers run in reverse order, so it runs last."""

    def __init__(self) -> None:
        self._value = f"{os.getpid()}-{time.time_ns()}"
        self._pid = os.getpid()
        self._status = 1
        self._threads_ended = threading.Event()
        os.environ[MARK] = self._value
        atexit.register(self._finish)

    def start(self, status: int) -> int:
        """Prepare the exit and return `status`, the exit status."""
        self._status = status
        if "multiprocessing" in sys.modules:  # its exit handler would wait for them
            import multiprocessing

            for child in multiprocessing.active_children():
                child.kill()
        atexit.register(self._threads_ended.set)  # the interpreter waits for threads before its exit handlers
        threading.Thread(target=self._watch, daemon=True, name="shutdown").start()
        return status

    def _watch(self) -> None:
        if not self._threads_ended.wait(PATIENCE_SECONDS):
            names = [thread.name for thread in threading.enumerate() if not thread.daemon]
            names = [name for name in names if name != threading.main_thread().name]
            with contextlib.suppress(OSError):
                print(f"envgym: threads that do not end are abandoned: {', '.join(names)}", file=sys.stderr)
            self._end_processes()
            self._exit()

    def _finish(self) -> None:
        if os.getpid() != self._pid:  # a fork of this process
            return
        cancellation = sys.modules.get("envgym.processes.cancellation")
        if cancellation is None:  # no episode was run
            return
        self._end_processes()
        # Code that swallows its cancellation would run again when it is garbage-collected, perhaps forever.
        if cancellation.abandoned_tasks():
            self._exit()

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)

    def _end_processes(self) -> None:
        """Kill the remaining processes of this program."""
        family = self._family()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in family:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            end = time.monotonic() + TERM_SECONDS
            while (family := {pid for pid in family if _is_running(pid)}) and time.monotonic() < end:
                time.sleep(0.01)

    def _family(self) -> set[int]:
        """The running processes that this one has started, except Python's resource tracker: it frees shared memory and
        ends by itself."""
        family = descendants({self._pid})
        mark = f"{MARK}={self._value}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            if mark in _read(path).split(b"\0"):
                family.add(int(path.parent.name))
        family = {pid for pid in family - {self._pid} if _is_running(pid)}
        return {pid for pid in family if b"multiprocessing.resource_tracker" not in _read(Path(f"/proc/{pid}/cmdline"))}


def _is_running(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _read(path: Path) -> bytes:
    """A file in /proc; empty if the process has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
