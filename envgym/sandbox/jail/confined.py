"""Isolation without namespaces: Landlock for files, seccomp for everything else, and one process only.

A program here can see that files exist and how large they are, but open none outside its own folder; it starts no
process, and so leaves none behind, and signals none. None of this rests on the kernel's version of Landlock: the
filter of system calls is as strict as the oldest needs it to be. Its folder is in the system's temporary one, where
each file is limited in size but not all of them together.
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
from .program import NOBODY, Host, Program, Streams, connect, environment, execute, limit, reset_signals, write_files

_DEVICES = ("/dev/random", "/dev/urandom")

# Landlock
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # the rest are rights on folders
_NET, _SCOPES = 3, 3  # bind and connect TCP; abstract sockets and signals to others


@contextmanager
def folder(host: Host) -> Iterator[str]:
    """A folder for one program, removed in the end whatever it holds."""
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
        except (OSError, RecursionError):  # folders nested deeper than Python can follow, or that nobody may read
            for command in (["/bin/chmod", "-R", "u+rwx"], ["/bin/rm", "-rf"]):
                subprocess.run([*command, "--", path], check=False, capture_output=True)


def become_program(path: str, program: Program, host: Host, streams: Streams) -> None:
    """Restrict this process and become the program. Never returns."""
    os.setsid()
    os.umask(0o022)
    os.chdir(f"{path}/work")
    stdin = _readable(program.stdin, f"{path}/tmp/stdin")
    if _can_be_nobody(host):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    linux.drop_capabilities()
    connect(stdin, streams)
    write_files(program)
    reset_signals()
    readable = (host.python, *host.readable, f"{path}/packages", *host.packages.values(), *_DEVICES)
    _restrict(readable, (f"{path}/work", f"{path}/tmp", "/dev/null"), host.hidden)
    limit(program)
    seccomp.install(namespaces=False)
    execute(host, environment(host, f"{path}/work", f"{path}/tmp", f"{path}/packages"))


def _readable(content: bytes, path: str) -> int:
    """A descriptor to read `content` from, of a file that has no name any more."""
    with open(path, "wb") as file:
        file.write(content)
    opened = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return opened


def _can_be_nobody(host: Host) -> bool:
    """True for root where Python lies in folders that every user may enter."""
    if os.geteuid() != 0:
        return False
    paths = [host.python]
    while paths[-1] != "/":
        paths.append(os.path.dirname(paths[-1]))
    return all(os.stat(path).st_mode & 0o001 for path in paths)


def landlock_version() -> int:
    """The version that the kernel has. Raises `OSError` where it has none (before 5.13, or switched off)."""
    return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1, what="landlock")


def _restrict(readable: Iterable[str], writable: Iterable[str], hidden: Collection[str]) -> None:
    """From now on this process can open only what lies at or below these paths, and of what is `hidden` no file.

    Paths that do not exist are skipped. Needs the no-new-privileges flag, and the filter of system calls (`seccomp`),
    which closes what older versions leave open. Raises `OSError` where the kernel has no Landlock.
    """
    known = landlock_version()
    every_right = (1 << 13) - 1  # <linux/landlock.h>; version 2 added moving between folders, 3 truncation, 5 ioctl
    every_right |= (known >= 2) << 13 | (known >= 3) << 14 | (known >= 5) << 15
    attributes = struct.pack("Q", every_right)
    if known >= 4:
        attributes += struct.pack("Q", _NET)
    if known >= 6:
        attributes += struct.pack("Q", _SCOPES)
    ruleset = linux.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0, what="landlock")
    for path in readable:
        for part, rights in _parts(path, hidden):
            _allow(ruleset, part, rights)
    for path in writable:
        _allow(ruleset, path, every_right)
    linux.syscall(_RESTRICT_SELF, ruleset, 0, what="landlock")
    os.close(ruleset)


def _parts(path: str, hidden: Collection[str]) -> Iterator[tuple[str, int]]:
    """A path to read as paths and rights that leave out what is hidden: rights cannot be taken back further down."""
    if path in hidden:
        return
    if not any(place.startswith(f"{path}/") for place in hidden):
        yield path, _READ
        return
    yield path, _READ_DIR
    for name in os.listdir(path):
        yield from _parts(f"{path}/{name}", hidden)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(opened).st_mode):
        rights &= _OF_A_FILE
    rule = struct.pack("=Qi", rights, opened)
    linux.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0, what=f"landlock {path}")
    os.close(opened)
