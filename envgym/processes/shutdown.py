"""The end of the program, also where an environment has left something that would go on or hold it up."""

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
"""Seconds for which threads of users' code may hold the end of the program up."""
TERM_SECONDS = 2.0
"""Seconds that processes that were left have after SIGTERM."""
MARK = "ENVGYM_COMMAND"
"""The environment variable that marks all processes a command starts, also those that have got another parent."""


class Shutdown:
    """Make it before anything else begins: its work at exit comes after everybody else's."""

    def __init__(self) -> None:
        self._value = f"{os.getpid()}-{time.time_ns()}"
        self._pid = os.getpid()
        self._status = 1
        self._threads_ended = threading.Event()
        os.environ[MARK] = self._value
        atexit.register(self._last)

    def begin(self, status: int) -> int:
        """Return `status` to be exited with, once nothing can hinder that any more."""
        self._status = status
        if "multiprocessing" in sys.modules:  # which would wait for them
            import multiprocessing

            for child in multiprocessing.active_children():
                child.kill()
        atexit.register(self._threads_ended.set)  # the interpreter waits for threads before all else
        threading.Thread(target=self._watch, daemon=True, name="shutdown").start()
        return status

    def _watch(self) -> None:
        if not self._threads_ended.wait(PATIENCE_SECONDS):
            names = [thread.name for thread in threading.enumerate() if not thread.daemon]
            names = [name for name in names if name != threading.main_thread().name]
            with contextlib.suppress(OSError):
                print(f"envgym: threads that do not end are left behind: {', '.join(names)}", file=sys.stderr)
            self._end_processes()
            self._exit()

    def _last(self) -> None:
        if os.getpid() != self._pid:  # a fork of ours that ends
            return
        cancellation = sys.modules.get("envgym.processes.cancellation")
        if cancellation is None:  # nothing was played
            return
        self._end_processes()
        # Code that swallows its cancellation would be run once more when it is collected, perhaps for ever.
        if cancellation.abandoned():
            self._exit()

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)

    def _end_processes(self) -> None:
        """Kill the processes that were started and still run."""
        family = self._family()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in family:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            end = time.monotonic() + TERM_SECONDS
            while (family := {pid for pid in family if _runs(pid)}) and time.monotonic() < end:
                time.sleep(0.01)

    def _family(self) -> set[int]:
        """The processes that this one has started, but for Python's own that frees shared memory: it ends by itself,
        and has work to do then."""
        family = descendants({self._pid})
        mark = f"{MARK}={self._value}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            if mark in _read(path).split(b"\0"):
                family.add(int(path.parent.name))
        family = {pid for pid in family - {self._pid} if _runs(pid)}
        return {pid for pid in family if b"multiprocessing.resource_tracker" not in _read(Path(f"/proc/{pid}/cmdline"))}


def _runs(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _read(path: Path) -> bytes:
    """A file of a process; empty where it has ended, or is not ours."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
