"""Processes that end together: children and programs that die with their parent, and process families that a guard
kills once their owner is gone.

This module also runs as a program, and imports nothing of envgym:

    family.py run PARENT PROGRAM [ARGUMENT …]    runs PROGRAM; it and all its descendants end with PARENT and with it
    family.py guard PID …                        kills the families of PIDs once its input has ended

A server that does not read its input would outlive a killed parent. Ray's servers notice the death of the program that
started them, but its agents take a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LOOK_SECONDS = 1.0
"""Seconds between two listings of the family."""
GRACE_SECONDS = 1
"""Seconds between SIGTERM to a guarded program's group and the end of its family."""
ENDING = {signal.SIGHUP, signal.SIGTERM}
"""Signals that end a family."""


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when `parent` dies, however it dies (Linux only; elsewhere a
    no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


# -- a program that dies with this process -----------------------------------------------------------------


def guard_command(command: list[str]) -> list[str]:
    """Wrap `command` so that it and all its descendants end with this process, at `end_guarded`, and when it ends by
    itself. The first line on its stderr is the process id for `end_guarded`."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, "run", str(os.getpid()), *command]


def end_guarded(pid: int) -> None:
    """Kill a guarded program that leads a process group, and all its descendants, also those in other groups (on Linux;
    elsewhere its group)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGHUP if sys.platform == "linux" else signal.SIGKILL)


def run(parent: int, command: list[str]) -> int:
    """Run a program until it or `parent` ends, at most for `GRACE_SECONDS` after a SIGTERM, then kill all that descends
    from it. Returns its exit status; for a signal 128 and its number, as in shells."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until `keep` handles them, or they would leave orphans
    adopt_orphans()
    die_with(parent, signal.SIGHUP)
    os.write(2, f"{os.getpid()}\n".encode())
    program = subprocess.Popen(command, preexec_fn=functools.partial(_begin, os.getpid()))
    os.closerange(0, 3)  # the pipes are the program's alone
    code = os.waitstatus_to_exitcode(keep(program.pid))
    return code if code >= 0 else 128 - code


def _begin(guard: int) -> None:
    """What a guarded program does before it is executed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    die_with(guard)


def adopt_orphans() -> None:
    """Make orphans of this process's family children of this process (Linux only)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def keep(child: int, grace: int = GRACE_SECONDS) -> int:
    """Wait for a child of this process, which has called `adopt_orphans`, then kill all that descends from it. Returns
    the child's wait status.

    SIGHUP kills them at once, SIGTERM after `grace` seconds: the child, in the same process group, has that signal too.
    """

    def kill_family(*signal_and_frame: object) -> None:
        # Once is enough, since the loop below kills again, and a flood of signals would nest this handler without end.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for pid in descendants({os.getpid()}) - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGHUP, kill_family)
    signal.signal(signal.SIGALRM, kill_family)
    # The first one counts: each further one would postpone the alarm.
    signal.signal(signal.SIGTERM, lambda *_: signal.getitimer(signal.ITIMER_REAL)[0] or signal.alarm(grace))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    pid = status = 0
    while pid != child:
        pid, status = os.waitpid(-1, 0)
    with contextlib.suppress(ChildProcessError):  # until none is left
        while True:
            kill_family()
            os.waitpid(-1, 0)
    return status


def pid_in(log: int) -> int | None:
    """The process id at the beginning of a guarded program's stderr."""
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
        os._exit(run(int(sys.argv[2]), sys.argv[3:]))
    guard({int(word) for word in sys.argv[2:]})
