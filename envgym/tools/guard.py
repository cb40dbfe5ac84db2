"""A program that becomes another one, which then dies with its parent; and the functions of that parent.

A server that is waiting for something else than its input would outlive a parent that was killed. The first line on
stderr is this process's id, which is the program's.

Usage: guard.py PARENT_PID PROGRAM [ARGUMENT …]
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def guarded(command: list[str]) -> list[str]:
    """The command that runs `command` so that it dies with this process."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def pid_in(log: int) -> int | None:
    """The process id at the beginning of a guarded program's stderr; the process leads a group of its own."""
    first, newline, _ = os.pread(log, 100, 0).partition(b"\n")
    return int(first) if sys.platform == "linux" and newline and first.isdigit() else None


def last_line(log: int) -> str:
    """The last line that a program wrote to its stderr."""
    # Not by seeking: the place in the file is the program's too.
    lines = os.pread(log, 4000, max(0, os.fstat(log).st_size - 4000)).decode("utf-8", "replace").splitlines()
    if pid_in(log) is not None and lines and lines[0].isdigit():
        lines = lines[1:]
    return next((line for line in reversed(lines) if line.strip()), "")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it died before the line above
        sys.exit(1)
    os.write(2, f"{os.getpid()}\n".encode())
    os.execvp(sys.argv[2], sys.argv[2:])
