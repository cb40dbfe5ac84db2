"""The jail's server: finds the isolation that this machine supports, then forks a supervisor for every program.

It receives connections over the socket that is its standard input, and ends when that closes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from . import namespaces, supervisor, wire
from .program import HostPaths, Program

_MSG_CMSG_CLOEXEC = 0x40000000  # <linux/socket.h>
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")


def main() -> None:
    """Choose the isolation, report it, and fork a supervisor for each connection that the control socket sends, until
    it closes."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # so that no file opened later becomes a standard stream
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by themselves
    settings, _ = wire.receive(control)
    readable = _readable_paths()
    python, package_folders = os.path.realpath(sys.executable), _package_folders(readable)
    host = HostPaths(python, readable, package_folders, settings["packages"], settings["temporary"])
    way, errors = _choose(host, settings["ways"])
    if way in ("root", "user"):
        namespaces.leave_host_namespaces(way)
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


def _choose(host: HostPaths, ways: list[str]) -> tuple[str, dict[str, str]]:
    """The first way of isolation in which a program runs here, and the errors of the ways before it."""
    errors: dict[str, str] = {}
    for way in ways:
        # A limit on processes does not bind the system's root, not even under another id in a user namespace.
        if way == ("user" if os.geteuid() == 0 else "root"):
            continue
        server_end, supervisor_end = socket.socketpair()
        _fork(way, host, supervisor_end, server_end, has_left=False)
        supervisor_end.close()
        server_end.sendall(wire.pack({"names": []}, (b"", b"")))  # an empty program
        try:
            report, (_, stderr) = wire.receive(server_end)
        except EOFError:
            report, stderr = {"failed": "the supervisor died"}, b""
        finally:
            server_end.close()
        if report.get("reason") == "ok":
            return way, errors
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        errors[way] = report.get("failed") or last or f"exit status {report['exit']}"
    return "", errors


def _fork(
    way: str, host: HostPaths, connection: socket.socket, unused: socket.socket, *, has_left: bool = True
) -> None:
    """Fork a supervisor that answers one request and closes its copy of the `unused` socket. `has_left`: this process
    has already left the host's namespaces."""
    if os.fork() != 0:
        return
    try:
        unused.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        answer: tuple[dict[str, Any], bytes, bytes]
        try:
            if not has_left and way != "confined":
                namespaces.leave_host_namespaces(way)
            header, (source, stdin, *contents) = wire.receive(connection)
            files = dict(zip(header.pop("names"), contents, strict=True))
            answer = supervisor.run_program(way, Program(source, stdin, files, **header), host, connection)
        except (supervisor.Abandoned, EOFError):
            return
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}, b"", b""
        report, *output = answer
        connection.sendall(wire.pack(report, output))
    finally:
        os._exit(0)


def _package_folders(readable: tuple[str, ...]) -> tuple[str, ...]:
    """Folders of installed packages below the readable paths."""
    folders = []
    for path in readable:
        for name in os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else ():
            if name.startswith("python3"):
                folders += [f"{path}/{name}/{kind}" for kind in ("site-packages", "dist-packages")]
    return tuple(filter(os.path.isdir, folders))


def _readable_paths() -> tuple[str, ...]:
    """Paths that Python needs to run: its own and the system's folders of libraries, and those of loaded libraries."""
    standard = os.path.dirname(os.path.dirname(os.path.realpath(os.__file__)))
    loaded = set()
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            path = line.split(maxsplit=5)[5].rstrip("\n") if line.count("/") else ""
            if path.startswith("/") and ".so" in os.path.basename(path):
                loaded.add(os.path.dirname(path))
    paths = {*_LIBRARIES, *_DATA, standard, os.path.realpath(sys.executable), *loaded}
    readable: list[str] = []
    for path in sorted(filter(os.path.exists, paths), key=len):
        parents = (folder for folder in readable if not os.path.islink(folder))
        if not any(path.startswith(f"{folder}/") for folder in parents):
            readable.append(path)
    return tuple(readable)
