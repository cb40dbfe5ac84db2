"""File access by path (Landlock), for kernels that give us no namespaces."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator

from . import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # the rest are rights on folders
_NET, _SCOPES = 3, 3  # bind and connect TCP; abstract sockets and signals to others


def version() -> int:
    """The version that the kernel has. Raises `OSError` where it has none (before 5.13, or switched off)."""
    return linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1, what="landlock")


def restrict(readable: Iterable[str], writable: Iterable[str], hidden: Collection[str]) -> None:
    """From now on this process can open only what lies at or below these paths, and of what is `hidden` no file.

    Paths that do not exist are skipped. Needs the no-new-privileges flag, and the filter of system calls (`seccomp`),
    which closes what older versions leave open. Raises `OSError` where the kernel has no Landlock.
    """
    known = version()
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
