"""Isolation without namespaces: Landlock for files, seccomp for everything else, and one process only.

A program can see that files exist and how large they are, but can open only those of its own folder; it can neither
start processes nor signal them. This holds for every version of Landlock, because the filter of system calls is strict
enough for the oldest. The program's folder is in the system's temporary folder, where the size of each file is limited
but not their total.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from . import linux, seccomp
from .program import (
    NOBODY,
    HostPaths,
    Program,
    Streams,
    connect,
    environment,
    execute,
    limit,
    reset_signals,
    write_files,
)

_DEVICES = ("/dev/random", "/dev/urandom")

# Landlock
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # the rest are rights on folders
_NET, _SCOPES = 3, 3  # bind and connect TCP; abstract sockets and signals to others


@contextmanager
def program_folder(host: HostPaths) -> Iterator[str]:
    """A temporary folder for one program, which is removed even if unreadable or nested deeply."""
    path = tempfile.mkdtemp(prefix="envgym-sandbox-", dir=host.temporary)
    try:
        for name in ("work", "tmp", "packages"):
            os.mkdir(f"{path}/{name}", 0o755)
        for source in host.packages.values():
            os.symlink(source, f"{path}/packages/{os.path.basename(source)}")
        if _can_be_nobody(host):
            os.chmod(path, 0o711)
            for name in ("work", "tmp"):
                os.chown(f"{path}/{name}", NOBODY, NOBODY)
        yield path
    finally:
        try:
            shutil.rmtree(path)
        except (OSError, RecursionError):  # folders nested too deep for Python, or unreadable
            for command in (["/bin/chmod", "-R", "u+rwx"], ["/bin/rm", "-rf"]):
                subprocess.run([*command, "--", path], check=False, capture_output=True)


def become_program(path: str, program: Program, host: HostPaths, streams: Streams) -> None:
    """Restrict this process and become the program. Never returns."""
    os.setsid()
    os.umask(0o022)
    os.chdir(f"{path}/work")
    stdin = _open_for_reading(program.stdin, f"{path}/tmp/stdin")
    if _can_be_nobody(host):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.drop_capabilities()
    connect(stdin, streams)
    write_files(program)
    reset_signals()
    readable = (host.python, *host.readable, f"{path}/packages", *host.packages.values(), *_DEVICES)
    _restrict(readable, (f"{path}/work", f"{path}/tmp", "/dev/null"), host.hidden_paths)
    limit(program)
    seccomp.install(namespaces=False)
    execute(host, environment(host, f"{path}/work", f"{path}/tmp", f"{path}/packages"))


def _open_for_reading(content: bytes, path: str) -> int:
    """A descriptor to read `content`, of a file that is already unlinked."""
    with open(path, "wb") as file:
        file.write(content)
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor


def _can_be_nobody(host: HostPaths) -> bool:
    """True for root, if every user may enter the folders of the Python interpreter."""
    if os.geteuid() != 0:
        return False
    paths = [host.python]
    while paths[-1] != "/":
        paths.append(os.path.dirname(paths[-1]))
    return all(os.stat(path).st_mode & 0o001 for path in paths)


def landlock_version() -> int:
    """The kernel's version of Landlock. Raises `OSError` if it has none (before 5.13, or disabled)."""
    return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1, label="landlock")


def _restrict(readable: Iterable[str], writable: Iterable[str], hidden_paths: Collection[str]) -> None:
    """Restrict this process to opening files at or below these paths, except files in `hidden_paths`.

    Paths that do not exist are skipped. Needs the no-new-privileges flag, and the filter of system calls (`seccomp`)
    for what older versions of Landlock do not restrict. Raises `OSError` if the kernel has no Landlock.
    """
    version = landlock_version()
    every_right = (1 << 13) - 1  # <linux/landlock.h>; version 2 added moving between folders, 3 truncation, 5 ioctl
    every_right |= (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    attributes = struct.pack("Q", every_right)
    if version >= 4:
        attributes += struct.pack("Q", _NET)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPES)
    ruleset = linux.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0, label="landlock")
    for path in readable:
        for part, rights in _grants(path, hidden_paths):
            _allow(ruleset, part, rights)
    for path in writable:
        _allow(ruleset, path, every_right)
    linux.syscall(_RESTRICT_SELF, ruleset, 0, label="landlock")
    os.close(ruleset)


def _grants(path: str, hidden_paths: Collection[str]) -> Iterator[tuple[str, int]]:
    """Paths and rights for reading `path` except hidden paths: rights cannot be revoked for paths below."""
    if path in hidden_paths:
        return
    if not any(inner.startswith(f"{path}/") for inner in hidden_paths):
        yield path, _READ
        return
    yield path, _READ_DIR
    for name in os.listdir(path):
        yield from _grants(f"{path}/{name}", hidden_paths)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Grant `rights` at and below `path`; a missing path is skipped."""
    try:
        descriptor = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _FILE_RIGHTS
    rule = struct.pack("=Qi", rights, descriptor)
    linux.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0, label=f"landlock {path}")
    os.close(descriptor)
