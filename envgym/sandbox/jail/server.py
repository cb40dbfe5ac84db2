"""The jail's server: finds out what this machine allows, then forks a supervisor for every program.

It is handed connections over the socket that is its standard input, and ends when that closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from . import namespaces, supervisor, wire
from .program import Host, Program

_MSG_CMSG_CLOEXEC = 0x40000000  # <linux/socket.h>
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_PROBE = {
    "names": [], "cpu": 10.0, "wall": 30.0, "memory": 2**29, "output": 2**16, "disk": 2**20, "files_at_most": 16,
    "open_files": 16, "processes": 4,
}  # fmt: skip
"""The limits of an empty program, by which it is found out what works here."""


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # no file opened later may take the place of a standard stream
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started this
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by themselves
    settings, _ = wire.receive(control)
    readable = _readable()
    python, installed = os.path.realpath(sys.executable), _installed(readable)
    host = Host(python, readable, installed, settings["packages"], settings["temporary"])
    way, errors = _choose(host, settings["ways"])
    if way in ("root", "user"):
        namespaces.settle(way)
    control.sendall(wire.pack({"way": way, "errors": errors}))
    while way:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1, _MSG_CMSG_CLOEXEC)
        if not message:
            break
        connection = socket.socket(fileno=descriptors[0])
        try:
            _fork(way, host, connection, control)
        except OSError as error:
            connection.sendall(wire.pack({"failed": f"fork: {error}"}, (b"", b"")))
        connection.close()


def _choose(host: Host, ways: list[str]) -> tuple[str, dict[str, str]]:
    """The first way in which a program runs here, and why those before it do not."""
    errors: dict[str, str] = {}
    for way in ways:
        # No limit on processes holds the system's root, whatever it is called in a user namespace.
        if way == ("user" if os.geteuid() == 0 else "root"):
            continue
        ours, theirs = socket.socketpair()
        _fork(way, host, theirs, ours, settled=False)
        theirs.close()
        ours.sendall(wire.pack(_PROBE, (b"", b"")))
        try:
            report, (_, stderr) = wire.receive(ours)
        except EOFError:
            report, stderr = {"failed": "the supervisor died"}, b""
        finally:
            ours.close()
        if report.get("reason") == "ok":
            return way, errors
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        errors[way] = report.get("failed") or last or f"exit status {report['exit']}"
    return "", errors


def _fork(way: str, host: Host, connection: socket.socket, other: socket.socket, *, settled: bool = True) -> None:
    """Fork a supervisor that answers one request; it does not keep `other`."""
    if os.fork() != 0:
        return
    try:
        other.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        answer: tuple[dict[str, Any], bytes, bytes]
        try:
            if not settled and way != "confined":
                namespaces.settle(way)
            header, (source, stdin, *contents) = wire.receive(connection)
            files = dict(zip(header.pop("names"), contents, strict=True))
            answer = supervisor.play(way, Program(source, stdin, files, **header), host, connection)
        except (supervisor.Abandoned, EOFError):
            return
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}, b"", b""
        report, *output = answer
        connection.sendall(wire.pack(report, output))
    finally:
        os._exit(0)


def _installed(readable: tuple[str, ...]) -> tuple[str, ...]:
    """Folders of installed packages in those of Python's own library."""
    found = []
    for path in readable:
        for name in os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else ():
            if name.startswith("python3"):
                found += [f"{path}/{name}/{kind}" for kind in ("site-packages", "dist-packages")]
    return tuple(filter(os.path.isdir, found))


def _readable() -> tuple[str, ...]:
    """Paths that Python needs to run: its own folder of libraries, the system's, and those it has in memory."""
    standard = os.path.dirname(os.path.dirname(os.path.realpath(os.__file__)))
    loaded = set()
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            path = line.split(maxsplit=5)[5].rstrip("\n") if line.count("/") else ""
            if path.startswith("/") and ".so" in os.path.basename(path):
                loaded.add(os.path.dirname(path))
    paths = {*_LIBRARIES, *_DATA, standard, os.path.realpath(sys.executable), *loaded}
    kept: list[str] = []
    for path in sorted(filter(os.path.exists, paths), key=len):
        parents = (folder for folder in kept if not os.path.islink(folder))
        if not any(path.startswith(f"{folder}/") for folder in parents):
            kept.append(path)
    return tuple(kept)
