"""Processes that end together: children and programs that die with their parent, and process families that a guard
kills once their owner is gone.

This module also runs as a program, and imports nothing of envgym:

    family.py run PARENT PROGRAM [ARGUMENT …]    becomes PROGRAM, which then dies with PARENT
    family.py guard PID …                        kills the families of PIDs once its input has ended

A server that does not read its input would outlive a killed parent. Ray's servers notice the death of the program that
started them, but its agents take a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LOOK_SECONDS = 1.0
"""Seconds between two listings of the family."""


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies, however it dies (Linux only; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


# -- a program that dies with this process -----------------------------------------------------------------


def guard_command(command: list[str]) -> list[str]:
    """Wrap `command` so that it dies with this process. The first line on its stderr is its process id."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, "run", str(os.getpid()), *command]


def pid_in(log: int) -> int | None:
    """The process id at the beginning of a guarded program's stderr; the process leads its own group."""
    first, newline, _ = os.pread(log, 100, 0).partition(b"\n")
    return int(first) if sys.platform == "linux" and newline and first.isdigit() else None


def last_line(log: int) -> str:
    """The last line of a program's stderr."""
    # Without seeking: the program shares the file position.
    lines = os.pread(log, 4000, max(0, os.fstat(log).st_size - 4000)).decode("utf-8", "replace").splitlines()
    if pid_in(log) is not None and lines and lines[0].isdigit():
        lines = lines[1:]
    return next((line for line in reversed(lines) if line.strip()), "")


# -- a family that is killed once its owner is gone ---------------------------------------------------------


def start_guard(pids: set[int]) -> subprocess.Popen[bytes]:
    """Start a guard that kills `pids` and all their descendants once this process is gone. Kill it to cancel that."""
    command = [sys.executable, "-P", __file__, "guard", *map(str, sorted(pids))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, close_fds=True)


def children() -> dict[int, set[int]]:
    """Process id -> its children's process ids, for all running processes."""
    tree: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))):
            tree.setdefault(int(fields[1]), set()).add(int(entry.name))
    return tree


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, … and start time at 19; none when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # a name may be any bytes
        return text.rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pids: set[int]) -> set[int]:
    """`pids`, their children, their children's children and so on."""
    tree, family, generation = children(), set(pids), set(pids)
    while generation:
        generation = {child for pid in generation for child in tree.get(pid, ())} - family
        family |= generation
    return family


def guard(pids: set[int]) -> None:
    """Wait until the input ends, then kill the family. Its members are recorded as it grows: when the owner dies some
    members die immediately, and their children can no longer be traced to the family."""
    family: dict[int, str] = {}
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        for pid in descendants(pids | set(family)):
            if fields := stat(pid):
                family.setdefault(pid, fields[19])
    for pid, started in family.items():
        fields = stat(pid)
        if fields and fields[19] == started:  # else the number belongs to another process by now
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        die_with(int(sys.argv[2]))
        os.write(2, f"{os.getpid()}\n".encode())
        os.execvp(sys.argv[3], sys.argv[3:])
    guard({int(word) for word in sys.argv[2:]})
