"""Ends processes whose owner was killed: `python guard.py PID …` waits for its input to end, then kills them.

Ray's servers notice by themselves that the program that started them is gone, but its agents take a minute over it.
The owner holds the other end of the input, and nothing else does, so that it ends with the owner however that dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

LOOK_SECONDS = 1.0
"""Time between two looks at who has joined the family."""


def start(pids: set[int]) -> subprocess.Popen[bytes]:
    """Have `pids` and all their descendants killed when this process is gone; kill the guard to call it off."""
    command = [sys.executable, "-P", __file__, *map(str, sorted(pids))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, close_fds=True)


def children() -> dict[int, set[int]]:
    """Process id -> its children's, of every process there is."""
    found: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))):
            found.setdefault(int(fields[1]), set()).add(int(entry.name))
    return found


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, … and start time at 19; none when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")  # a name may be any bytes
        return text.rpartition(")")[2].split()
    except OSError:
        return []


def descendants(pids: set[int]) -> set[int]:
    """`pids`, their children, their children's children and so on."""
    tree, family, fresh = children(), set(pids), set(pids)
    while fresh:
        fresh = {child for pid in fresh for child in tree.get(pid, ())} - family
        family |= fresh
    return family


def watch(pids: set[int]) -> None:
    """Wait until the input ends, then kill the family. It is written down as it grows: when the owner dies some of
    it die at once, and whose children the others were can then no longer be seen."""
    family: dict[int, str] = {}
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        for pid in descendants(pids | set(family)):
            if fields := stat(pid):
                family.setdefault(pid, fields[19])
    for pid, started in family.items():
        fields = stat(pid)
        if fields and fields[19] == started:  # else the number belongs to another process by now
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch({int(word) for word in sys.argv[1:]})
