"""A program with its limits, and the last steps before a process becomes it."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOBODY = 65534
_SOURCE = "main.py"
_STACK_BYTES = 8 * 2**20  # also of each thread, for which address space is set aside
_LIBC_SIGNALS = (32, 33)


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Paths of this machine that programs use: the interpreter, readable paths, hidden paths below them (installed
    packages), packages that may be imported, and the parent of their folders if they share the file system."""

    python: str
    readable: tuple[str, ...]
    hidden_paths: tuple[str, ...]
    packages: Mapping[str, str]
    temporary: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program, the files it starts with (`contents`), and its limits, as in `sandbox.Limits`. The defaults are enough
    for the empty program that tests each way of isolation."""

    source: bytes
    stdin: bytes
    contents: Mapping[str, bytes]
    cpu_seconds: float = 10.0
    wall_seconds: float = 30.0
    memory_mb: int = 512
    output_kb: int = 64
    disk_mb: int = 1
    files: int = 16
    open_files: int = 16
    processes: int = 4


@dataclass(frozen=True, slots=True)
class Streams:
    """File descriptors: the program's output, and the status stream of its parents, which it cannot write to."""

    stdout: int
    stderr: int
    status: int


def environment(host: HostPaths, home: str, temporary: str, packages: str) -> dict[str, str]:
    """All variables of a program. The hash seed is fixed, so that a program behaves the same in every run."""
    variables = {
        "HOME": home, "TMPDIR": temporary, "PATH": os.path.dirname(host.python), "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONINTMAXSTRDIGITS": "0",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
    return {**variables, "PYTHONPATH": packages} if host.packages else variables


def write_files(program: Program) -> None:
    """Write the program and its files to the current folder."""
    for name, content in {_SOURCE: program.source, **program.contents}.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def limit(program: Program, *, processes: int | None = None) -> None:
    """Set the kernel's limits per process, and a limit on the processes of this user (None: no limit)."""
    cpu = math.ceil(program.cpu_seconds)
    memory, disk = program.memory_mb * 2**20, program.disk_mb * 2**20
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),  # SIGXCPU, then SIGKILL if it is ignored
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (disk, disk),
        resource.RLIMIT_NOFILE: (program.open_files, program.open_files),
        resource.RLIMIT_STACK: (_STACK_BYTES, 8 * _STACK_BYTES),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
    }
    if processes is not None:
        limits[resource.RLIMIT_NPROC] = (processes, processes)
    for kind, (soft, hard) in limits.items():
        _, maximum = resource.getrlimit(kind)
        if maximum != resource.RLIM_INFINITY:  # this process may have a lower limit
            soft, hard = min(soft, maximum), min(hard, maximum)
        resource.setrlimit(kind, (soft, hard))


def connect(stdin: int, streams: Streams) -> None:
    """Make the standard streams, and close everything else but `status`, which closes as the program starts."""
    for source, target in ((stdin, 0), (streams.stdout, 1), (streams.stderr, 2)):
        os.dup2(source, target)
    close_all_but(streams.status, first=3)


def close_all_but(descriptor: int, *, first: int = 0) -> None:
    os.closerange(first, descriptor)
    os.closerange(descriptor + 1, 2**16)


def report(streams: Streams, **notes: Any) -> None:
    """Send the supervisor a note: how the program ended, or what failed."""
    os.write(streams.status, json.dumps(notes).encode() + b"\n")


def reset_signals() -> None:
    for number in set(range(1, signal.NSIG)) - {signal.SIGKILL, signal.SIGSTOP, *_LIBC_SIGNALS}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def execute(host: HostPaths, variables: Mapping[str, str]) -> None:
    """Become the program. Never returns; raises `OSError`."""
    os.execve(host.python, [host.python, "-s", "-S", _SOURCE], variables)
