"""The memory and CPU time of a process and all its descendants, from `/proc`."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")


def usage(root: int, n_enough: int, memory_enough: int) -> tuple[int, int, float]:
    """How many processes there are, bytes that they hold, and seconds of CPU time used, also by those that ended.

    Counts no further than the first process over `n_enough`. Memory that processes share is counted for each of them,
    unless that comes to more than `memory_enough`: then it is shared out, which takes longer to find out.
    """
    memory = 0
    cpu = 0.0
    processes = _tree(root, n_enough)
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                # After the name, which may hold anything: utime, stime, and both of the children waited for.
                fields = file.read().rpartition(b")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS
            memory += _resident(process)
        except OSError:
            continue  # it has ended
    if memory > memory_enough:
        memory = sum(_exact(process) for process in processes)
    return len(processes), memory, cpu


def _tree(root: int, n_enough: int) -> list[int]:
    found = [root]
    for process in found:  # grows as children are found
        if len(found) > n_enough:
            break
        try:
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children", "rb") as file:
                    found.extend(map(int, file.read().split()))
        except OSError:
            continue
    return found


def _resident(process: int) -> int:
    return _of_lines(f"/proc/{process}/status", (b"RssAnon:", b"RssShmem:"))


def _exact(process: int) -> int:
    try:
        return _of_lines(f"/proc/{process}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:"))
    except PermissionError:
        return _resident(process)
    except OSError:
        return 0  # it has ended


def _of_lines(path: str, names: tuple[bytes, ...]) -> int:
    """Bytes that the lines with these names come to; each gives kilobytes."""
    with open(path, "rb") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(names))
