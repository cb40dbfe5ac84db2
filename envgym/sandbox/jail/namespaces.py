"""Namespaces: a program with a file system, a process table and users of its own, and no network.

Its file system has of this machine the Python interpreter, the system's libraries and three devices, read-only. What
the program writes goes to a small file system in memory that ends with it.
"""

from __future__ import annotations

import os
import select
import signal
import socket

from . import linux, seccomp
from .program import (
    NOBODY,
    HostPaths,
    Program,
    Streams,
    close_all_but,
    connect,
    environment,
    execute,
    limit,
    report,
    reset_signals,
    write_files,
)

ROOT = os.path.dirname(os.path.abspath(__file__))
"""Mount point of the new root. Any folder does: only the program's own mount namespace sees it there."""
_SCRATCH, _HOME, _TEMPORARY, _SHARED, _PACKAGES = "/box", "/box/work", "/box/tmp", "/box/shm", "/packages"
_DEVICES = ("null", "random", "urandom")
_ROOT_BYTES = 2**20  # of folders, links and places to mount on; the standard input comes on top


def leave_host_namespaces(isolation: str) -> None:
    """Leave this machine's network, IPC, host name and control groups, once for all programs of a server.

    The server calls it before its programs, which inherit the namespaces; so does each trial of an isolation. Programs
    cannot communicate there: the filter of system calls allows neither sockets nor IPC. One network namespace per
    program would cost up to seconds while many are created and removed. `root` has the right to do this; `user` first
    creates a user namespace, in which this user is called nobody, if the kernel lets everybody create one.
    """
    if isolation == "user":
        user, group = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER, "user namespaces")
        proc = os.open("/proc", os.O_PATH)
        _map_users(proc, user, group)
        os.close(proc)
    flags = linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
    linux.unshare(flags, "network, IPC, host name and control group namespaces")
    socket.sethostname("sandbox")


def become_init(way: str, program: Program, host: HostPaths, streams: Streams) -> None:
    """Build the jail, start the program in it, wait, and write its end to the status stream. `way` is the isolation.
    Never returns.

    When this process ends, the kernel kills whatever still lives in the namespace.
    """
    os.setsid()
    linux.unshare(linux.CLONE_NEWNS, "mount namespaces")
    proc = os.open("/proc", os.O_PATH)
    _build(program, host)
    stdin = os.open(f"{ROOT}/dev/stdin", os.O_RDONLY)
    enter_root(way, proc)
    os.chdir(_HOME)
    poll = select.poll()
    poll.register(streams.status, 0)
    if poll.poll(0):
        os._exit(1)  # the supervisor died before PDEATHSIG was set
    child = os.fork()
    if child == 0:
        _start(program, host, stdin, streams)
    close_all_but(streams.status)
    pid, status, usage = os.wait4(-1, 0)
    while pid != child:  # an orphan's end
        pid, status, usage = os.wait4(-1, 0)
    report(streams, status=status, cpu=usage.ru_utime + usage.ru_stime)
    os._exit(0)


def _start(program: Program, host: HostPaths, stdin: int, streams: Streams) -> None:
    """Become the program in the child of process 1; report errors until it runs. Never returns."""
    try:
        os.setsid()
        os.umask(0o022)
        connect(stdin, streams)
        write_files(program)
        limit(program, processes=program.processes + 1)  # the kernel counts process 1 too
        seccomp.install(namespaces=True)
        execute(host, environment(host, _HOME, _TEMPORARY, _PACKAGES))
    except BaseException as error:
        report(streams, failed=f"{type(error).__name__}: {error}")
    finally:
        os._exit(127)


def _build(program: Program, host: HostPaths) -> None:
    """Put the new file system together at `ROOT`."""
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    size = _ROOT_BYTES + len(program.stdin)
    linux.mount("tmpfs", ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"size={size},mode=755")
    for path in host.readable:
        show(path)
    for path in host.hidden_paths:
        flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
        linux.mount("tmpfs", ROOT + path, "tmpfs", flags, "size=4k,mode=755")
    for path in host.packages.values():
        show(path, f"{_PACKAGES}/{os.path.basename(path)}")
    for device in _DEVICES:
        show(f"/dev/{device}", devices=True)
    os.makedirs(ROOT + _SCRATCH)
    options = f"size={program.disk_mb}m,nr_inodes={program.files + 8},mode=755"
    linux.mount("tmpfs", ROOT + _SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, options)
    for folder in (_HOME, _TEMPORARY, _SHARED):
        os.mkdir(ROOT + folder, 0o700)
        os.chown(ROOT + folder, NOBODY, NOBODY)
    os.symlink(_TEMPORARY, f"{ROOT}/tmp")
    os.symlink(_SHARED, f"{ROOT}/dev/shm")
    with open(f"{ROOT}/dev/stdin", "wb") as file:
        file.write(program.stdin)


def show(source: str, target: str = "", *, devices: bool = False, writable: bool = False) -> None:
    """Make a file or folder of this machine visible in the new root as `target` (default: by its path), read-only
    unless `writable`. A link by its path stays one."""
    place = ROOT + (target or source)
    if os.path.islink(source) and not target:  # /lib -> usr/lib
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.symlink(os.readlink(source), place)
        return
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "xb"):
            pass
    linux.mount(source, place, None, linux.MS_BIND | (0 if writable else linux.MS_REC))
    if writable:
        linux.refuse_devices(place)
    else:
        linux.make_read_only(place, devices=devices)


def enter_root(way: str, proc: int, number: int = NOBODY) -> None:
    """Make `ROOT` this process's root, and give up all rights, in a user namespace of its own, whose only user is
    nobody. In it that user has `number`. `proc` is an open `/proc`, which is closed.

    The kernel counts its processes apart from those of all others, so that a limit on them is the program's own.
    """
    linux.pivot_into(ROOT)
    linux.make_read_only("/", devices=True, recursive=False)
    if way == "root":
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else the files below would still be root's
    linux.unshare(linux.CLONE_NEWUSER, "a second user namespace")
    _map_users(proc, NOBODY, NOBODY, number)
    os.close(proc)
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # nobody looks into this process
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    reset_signals()  # process 1 is immune to signals from within, unless it handles them


def _map_users(proc: int, user: int, group: int, number: int = NOBODY) -> None:
    """Give this user and group `number` in the namespace just made. `proc` is an open `/proc`."""
    texts = {"setgroups": "deny", "uid_map": f"{number} {user} 1", "gid_map": f"{number} {group} 1"}
    for name, text in texts.items():
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)
