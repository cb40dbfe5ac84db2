"""System calls that Python has no function for. All of them raise `OSError` on failure."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITIES = 64  # more than there are; the kernel rejects unknown ones

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442  # <asm-generic/unistd.h>; system calls from 424 on have one number everywhere
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # <linux/sockios.h>, <net/if.h>
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4


def check(result: int, label: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{label}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: Any, label: str) -> int:
    return check(LIBC.syscall(ctypes.c_long(number), *arguments), label)


def prctl(option: int, *arguments: int, label: str = "prctl") -> int:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return check(LIBC.prctl(option, *padded), label)


def unshare(flags: int, label: str) -> None:
    check(LIBC.unshare(flags), label)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    kind_bytes = None if kind is None else kind.encode()
    result = LIBC.mount(os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), options.encode())
    check(result, f"mount {target}")


def make_read_only(target: str, *, devices: bool = False, recursive: bool = True) -> None:
    """Make a mount (and those below it) read-only, without set-user-id programs and devices (unless `devices`)."""
    attributes = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | (0 if devices else _MOUNT_ATTR_NODEV)
    _add_attributes(target, attributes, _AT_RECURSIVE if recursive else 0)


def refuse_devices(target: str) -> None:
    """Make a mount one without set-user-id programs and devices."""
    _add_attributes(target, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0)


def _add_attributes(target: str, attributes: int, flags: int) -> None:
    settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), flags, settings, ctypes.c_size_t(32),
        label=f"mount_setattr {target}",
    )  # fmt: skip


def start_loopback() -> None:
    """Start the loopback interface of a network namespace just made."""
    request = bytearray(struct.pack("16sH22x", b"lo", _IFF_UP))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, _SIOCSIFFLAGS, request)


def pivot_into(folder: str) -> None:
    """Make `folder`, a mount point, the root of this process's mount namespace and unmount the old root."""
    os.chdir(folder)
    syscall(_PIVOT_ROOT[platform.machine()], b".", b".", label="pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop all capabilities permanently, including any that a later `exec` would grant."""
    for capability in range(_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one, or no right to drop any
    prctl(PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
