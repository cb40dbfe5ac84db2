"""A box: namespaces in which many commands run one after another or at once, with processes and files that stay.

Its file system has of this machine the system's programs, read-only, and the given folders, writable. It has a
network, with the loopback interface alone. The commands' user is called root and is nobody on this machine (or the
user who started the box). All processes end with the box, which ends when its control socket closes.

    control socket (SEQPACKET), messages are JSON
      <- {"way": "root" | "user", "folders": {"/app": FOLDER}}     once
      -> {} | {"failed": "…"}                                      once
      <- {"words": ["bash", "-c", "…"], "cwd": "/app", "environ": {}}, with descriptors of the command's standard input,
         output and errors, and of a socket: to it goes the exit status in digits (negative: a signal). If it closes
         before, the command is ended, with the processes of its group.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
from typing import Any, NoReturn

from . import linux, seccomp
from .namespaces import ROOT, enter_root, leave_host_namespaces, show
from .program import NOBODY, reset_signals
from .supervisor import offer_to_the_out_of_memory_killer

MESSAGE_BYTES = 2**18
PROCESSES = 1024
"""Maximum processes and threads of the commands together."""
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/os-release",
    "/etc/terminfo", "/etc/debian_version", "/etc/localtime", "/etc/mime.types", "/etc/protocols", "/etc/services",
    "/etc/magic",
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2", "/dev/ptmx": "pts/ptmx", "/etc/mtab": "/proc/self/mounts",
}  # fmt: skip
_FILES = {
    "/etc/passwd": f"root:x:0:0:root:/root:/bin/bash\nnobody:x:{NOBODY}:{NOBODY}:nobody:/nonexistent:/bin/false\n",
    "/etc/group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/hostname": "sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def main() -> NoReturn:
    """Make a box, tell the control socket, which is the standard input, and serve it. Never returns."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # so that no file opened later becomes a standard stream
    settings = json.loads(control.recv(MESSAGE_BYTES))
    try:
        leave_host_namespaces(settings["way"])
        linux.start_loopback()
        linux.unshare(linux.CLONE_NEWPID, "process namespaces")  # the next child is process 1
        init = os.fork()
        if init == 0:
            _become_init(settings["way"], settings["folders"])
            control.send(b"{}")
            _serve(control)
        control.close()
        os.waitpid(init, 0)
    except BaseException as error:
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(0)


def _become_init(way: str, folders: dict[str, str]) -> None:
    """Build the box's file system around this process, and give up all rights."""
    os.setsid()
    offer_to_the_out_of_memory_killer()
    linux.unshare(linux.CLONE_NEWNS, "mount namespaces")
    proc = os.open("/proc", os.O_PATH)
    _build(folders)
    enter_root(way, proc, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    seccomp.install(namespaces=True, box=True)


def _build(folders: dict[str, str]) -> None:
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for path in filter(os.path.exists, _SYSTEM):
        show(path)
    for device in _DEVICES:
        show(f"/dev/{device}", devices=True)
    for path, target in _LINKS.items():
        os.symlink(target, ROOT + path)
    for path, text in _FILES.items():
        with open(ROOT + path, "w", encoding="ascii") as file:
            file.write(text)
    for folder in ("/dev/pts", "/dev/shm", "/proc"):
        os.mkdir(ROOT + folder)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", f"{ROOT}/dev/shm", "tmpfs", flags, "size=64m,mode=1777")
    linux.mount("devpts", f"{ROOT}/dev/pts", "devpts", linux.MS_NOSUID, "newinstance,ptmxmode=0666,mode=600")
    for path, folder in sorted(folders.items()):  # /logs/agent after /logs
        show(folder, path, writable=True)
    with contextlib.suppress(PermissionError):  # none where this machine is a container that hides parts of its own
        # Read-only, so that nobody maps users to make namespaces or changes settings of the kernel.
        linux.mount("proc", f"{ROOT}/proc", "proc", flags | linux.MS_NOEXEC | linux.MS_RDONLY)


def _serve(control: socket.socket) -> NoReturn:
    """Run the commands that `control` asks for, until it closes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    callers: dict[int, int] = {}
    """The sockets of the commands by their processes."""
    while True:
        readable, _, _ = select.select([control.fileno(), reader, *callers.values()], [], [])
        for process, caller in callers.items():
            if caller in readable:  # it has closed
                _kill(process)
        if reader in readable:
            os.read(reader, 2**16)
            _report_ends(callers)
        if control.fileno() in readable:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            if not message:
                os._exit(0)  # and the kernel ends all others
            process = os.fork()
            if process == 0:
                _execute(json.loads(message), descriptors[:3])
            callers[process] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)


def _kill(process: int) -> None:
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)  # it has not made its group yet


def _report_ends(callers: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            if caller := callers.pop(end[0], None):  # else an orphan
                with contextlib.suppress(BrokenPipeError):
                    os.write(caller, str(os.waitstatus_to_exitcode(end[1])).encode())
                os.close(caller)


def _execute(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become a command."""
    try:
        os.setsid()
        os.umask(0o022)
        signal.set_wakeup_fd(-1)
        reset_signals()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 2**16)
        os.chdir(request["cwd"])
        os.execvpe(request["words"][0], request["words"], request["environ"])
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(126)
