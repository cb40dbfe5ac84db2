"""A filter of system calls (seccomp): no sockets, tracing, namespaces or calls for administration.

It adds to the namespaces what they do not isolate (some kinds of sockets, memory that belongs to no process, rarely
used parts of the kernel). Without namespaces it complements Landlock, and closes what old versions of Landlock do not
restrict (signals, truncation, devices), so that the kernel's version does not matter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct

from . import linux

_X86, _ARM = "x86_64", "aarch64"
_AUDIT_ARCH = {_X86: 0xC000003E, _ARM: 0xC00000B7}
_FIRST_UNLISTED = 463
"""System calls from this number on are newer than the list; programs get ENOSYS for them."""

# The number on x86_64, and on aarch64 (None: does not exist there).
_CLONE, _CLONE3, _MMAP, _PRLIMIT = (56, 220), (435, 435), (9, 222), (302, 261)
_SOCKETPAIR, _SIGACTION, _KILL, _TGKILL = (53, 199), (13, 134), (62, 129), (234, 131)
_FCNTL, _IOCTL, _OPEN, _OPENAT, _OPENAT2 = (72, 25), (16, 29), (2, None), (257, 56), (437, 437)
_SOCKET, _ISOLATED_FAMILIES = (41, 198), (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink
_UNIX_FAMILY, _STREAM, _KIND_OF_SOCKET = 1, 1, 0xF
_CLONE_THREAD = 0x00010000
_MAP_SHARED_ANONYMOUS = 0x21
_NAMESPACES = 0x7E020080  # every CLONE_NEW… flag, time namespaces included
_SET_FLAGS, _SIGNALS_TO_OTHERS = 4, (8, 10, 15)  # F_SETFL; F_SETOWN, F_SETSIG, F_SETOWN_EX
_ASYNC, _ACCESS, _TRUNCATE = 0x2000, 3, 0x200  # O_ASYNC, O_ACCMODE, O_TRUNC
_HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, which Python calls on its streams."""

_LOAD, _AND, _EQUAL, _GREATER_OR_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data, <linux/seccomp.h>
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_MODE_FILTER = 2


def _denied(kind: str) -> list[tuple[int | None, int | None]]:
    """The numbers of the system calls in one part of `system_calls.txt`."""
    with open(os.path.join(os.path.dirname(__file__), "system_calls.txt"), encoding="ascii") as file:
        part = file.read().split(f"[{kind}]\n")[1].split("\n\n")[0]
    rows = (line.split() for line in part.splitlines())
    return [(None if x86 == "-" else int(x86), None if arm == "-" else int(arm)) for _, x86, arm in rows]


# Read when the server starts, because a program's process cannot open the file.
_DENIED, _DENIED_OUTSIDE_A_BOX = _denied("always"), _denied("outside a box")
_DENIED_WITHOUT_NAMESPACES = _denied("without namespaces")


def install(*, namespaces: bool, box: bool = False) -> None:
    """Filter this process and all it starts, from now on. Needs the no-new-privileges flag.

    `namespaces`: the process has separate namespaces. Otherwise the filter also denies to start processes, signal
    others, and change owners and modes of files. `box`: all processes in these namespaces belong together, so they may
    use sockets, but only of kinds that the namespaces isolate, IPC and tracing among themselves. Raises `OSError` if
    the kernel has no filters, or for an architecture without a list.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"seccomp: no list of system calls for {machine}")
    code = b"".join(_program(0 if machine == _X86 else 1, _AUDIT_ARCH[machine], namespaces, box))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    header = ctypes.create_string_buffer(program, len(program))
    linux.prctl(linux.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header), label="seccomp")


def _program(column: int, arch: int, namespaces: bool, box: bool) -> list[bytes]:
    """Instructions of a classic BPF program; a test that fails jumps over the instructions after it."""
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, arch, 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_GREATER_OR_EQUAL, _FIRST_UNLISTED, 0, 1),  # x32's calls on x86_64 as well
        _deny(errno.ENOSYS),
        *_if_call(_CLONE3[column], [_deny(errno.ENOSYS)]),  # its flags cannot be read here; C libraries fall back
    ]
    if box:
        program += _unless(_SOCKET[column], _deny_all_but(0, _ISOLATED_FAMILIES))
    else:
        program += [
            *_unless(_PRLIMIT[column], _deny_all_but(0, (0,))),  # only its own limits
            # Memory that processes share without a file could exist without counting for any of them.
            *_unless(_MMAP[column], _deny_values(3, (_MAP_SHARED_ANONYMOUS,), mask=_MAP_SHARED_ANONYMOUS)),
            # Stream pairs are closed; a datagram socket could send to any address of this machine.
            *_unless(
                _SOCKETPAIR[column],
                _deny_all_but(0, (_UNIX_FAMILY,)) + _deny_all_but(1, (_STREAM,), mask=_KIND_OF_SOCKET),
            ),
        ]
    clone = [_instruction(_LOAD, _argument(0)), _instruction(_ANY_BIT, _NAMESPACES, 0, 1), _deny(errno.EPERM)]
    denied = _DENIED if box else _DENIED + _DENIED_OUTSIDE_A_BOX
    if namespaces and not box:
        program += _unless(_SIGACTION[column], _keep_sigchld())
    elif not namespaces:
        denied = denied + _DENIED_WITHOUT_NAMESPACES
        clone += [_instruction(_ANY_BIT, _CLONE_THREAD, 1, 0), _deny(errno.EPERM)]
        program += _deny_host_access(column)
    program += _unless(_CLONE[column], clone)
    for numbers in denied:
        program += _if_call(numbers[column], [_deny(errno.EPERM)])
    return [*program, _instruction(_RETURN, _ALLOW)]


def _deny_host_access(column: int) -> list[bytes]:
    """Instructions for a process that shares files, devices and process ids with this machine."""
    process = linux.LIBC.getpid()
    program = []
    for call in (_KILL, _TGKILL):
        program += _unless(call[column], _deny_all_but(0, (process,)))
    # Descriptors can send signals to any process, too.
    program += _unless(_FCNTL[column], _deny_values(1, _SIGNALS_TO_OTHERS) + _no_signals_from_descriptors())
    program += _unless(_IOCTL[column], _deny_all_but(1, _HARMLESS_IOCTLS))
    # Access mode 3 opens for `ioctl` without rights to read or write; O_TRUNC truncates even when opened for reading.
    for numbers, flags in ((_OPEN, 1), (_OPENAT, 2)):
        refusals = _deny_values(flags, (_ACCESS,), mask=_ACCESS)
        refusals += _deny_values(flags, (_TRUNCATE,), mask=_TRUNCATE | _ACCESS)
        program += _unless(numbers[column], refusals)
    return program + _if_call(_OPENAT2[column], [_deny(errno.ENOSYS)])  # its flags cannot be read here


def _if_call(number: int | None, instructions: list[bytes]) -> list[bytes]:
    return [] if number is None else [_instruction(_EQUAL, number, 0, len(instructions)), *instructions]


def _unless(number: int | None, refusals: list[bytes]) -> list[bytes]:
    """Allow a call unless one of the tests denies it."""
    return _if_call(number, [*refusals, _instruction(_RETURN, _ALLOW)])


def _deny_values(argument: int, values: tuple[int, ...], *, mask: int = 0xFFFFFFFF) -> list[bytes]:
    """Deny a call by an argument's low half: the arguments tested here have no high half."""
    program = [_instruction(_LOAD, _argument(argument)), _instruction(_AND, mask)]
    for value in values:
        program += [_instruction(_EQUAL, value, 0, 1), _deny(errno.EPERM)]
    return program


def _deny_all_but(argument: int, values: tuple[int, ...], *, mask: int = 0xFFFFFFFF) -> list[bytes]:
    program = [_instruction(_LOAD, _argument(argument)), _instruction(_AND, mask)]
    program += [_instruction(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [*program, _deny(errno.EPERM)]


def _no_signals_from_descriptors() -> list[bytes]:
    """Deny `fcntl` calls that set O_ASYNC."""
    return [
        _instruction(_LOAD, _argument(1)),
        _instruction(_EQUAL, _SET_FLAGS, 0, 3),
        _instruction(_LOAD, _argument(2)),
        _instruction(_ANY_BIT, _ASYNC, 0, 1),
        _deny(errno.EPERM),
    ]


def _keep_sigchld() -> list[bytes]:
    """Deny to change the action of SIGCHLD: the CPU time of ignored children would not be counted.

    The new action is in memory that a filter cannot read, so only reading the action is allowed.
    """
    return [
        _instruction(_LOAD, _argument(0)),
        _instruction(_EQUAL, signal.SIGCHLD, 1, 0),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _argument(1)),
        _instruction(_EQUAL, 0, 0, 2),
        _instruction(_LOAD, _argument(1) + 4),
        _instruction(_EQUAL, 0, 1, 0),
        _deny(errno.EPERM),
    ]


def _argument(position: int) -> int:
    return _ARGUMENTS_AT + 8 * position


def _deny(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
