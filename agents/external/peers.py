"""The program at the other end of a connection over loopback, looked up in /proc of Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def program_of(client: tuple[str, int], server: tuple[str, int], own: int, others: Iterable[int]) -> int | None:
    """The one of the programs `own` and `others`, each named by the process that leads its session, that has the socket
    from `client` to `server` (IPv4 addresses), itself or in a process that it started.

    None where it cannot be determined: the process is another user's, in a container, or has left its program for good.
    """
    link = f"socket:[{_inode(client, server)}]"
    if any(_session(process) == own and _holds(process, link) for process in _processes()):  # nearly always
        return own
    programs = {own, *others}
    for process in _processes():
        if _holds(process, link):
            for ancestor in _ancestry(process):
                if found := programs & {ancestor, _session(ancestor)}:
                    return found.pop()
    return None


def _inode(client: tuple[str, int], server: tuple[str, int]) -> str:
    addresses = [_in_table(*client), _in_table(*server)]
    try:
        with open("/proc/net/tcp", encoding="ascii") as table:
            return next((row[9] for line in table if (row := line.split())[1:3] == addresses), "")
    except OSError:
        return ""


def _in_table(host: str, port: int) -> str:
    """An address as the table of sockets has it: bytes in the machine's order, here little-endian."""
    return "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{port:04X}"


def _processes() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdigit()) if os.path.isdir("/proc") else ()


def _session(process: int) -> int | None:
    try:
        return os.getsid(process)
    except OSError:
        return None


def _holds(process: int, link: str) -> bool:
    folder = f"/proc/{process}/fd"
    try:
        for number in os.listdir(folder):
            try:
                if os.readlink(f"{folder}/{number}") == link:
                    return True
            except FileNotFoundError:  # closed meanwhile
                continue
    except OSError:  # another user's, or it has ended
        pass
    return False


def _ancestry(process: int) -> Iterator[int]:
    """A process, its parent, and so on."""
    while process > 1:
        yield process
        try:
            stat = Path(f"/proc/{process}/stat").read_bytes()  # the name in it may be any bytes
            process = int(stat.rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            return
