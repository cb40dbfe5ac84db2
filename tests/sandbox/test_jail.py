"""What shuts programs in: refused system calls, old kernels, CPU time that hides, limits of each process."""

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from envgym.sandbox import Execution, Limits, Sandbox, jail
from envgym.sandbox import sandbox as sandbox_module

LIMITS = Limits(cpu_seconds=2, wall_seconds=30, memory_mb=256, output_kb=64, disk_mb=4, open_files=32, processes=8)
WAYS = ["namespaces", "landlock"]
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by their numbers on x86_64")


def run(source, way, limits=LIMITS, **settings) -> Execution:
    async def main():
        sandbox = Sandbox(limits, **settings)
        sandbox._ways = ("confined",) if way == "landlock" else ("root", "user")
        async with sandbox:
            assert sandbox.isolation.kind == way
            return await sandbox.run(source)

    return asyncio.run(main())


ATTEMPT = """
import ctypes, fcntl, json, os, signal, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
said = {}
def attempt(name, what, *arguments):
    "Note how it was refused, or what came of it."
    try:
        said[name] = repr(what(*arguments))
    except OSError as error:
        said[name] = type(error).__name__
"""
SAY = "\nprint(json.dumps(said))"

# <asm/unistd_64.h>; left out are calls that the kernel itself refuses to one who has no rights.
REFUSED = {
    "add_key": 248, "adjtimex": 159, "bind": 49, "bpf": 321, "chroot": 161, "clock_adjtime": 305,
    "clock_settime": 227, "connect": 42, "delete_module": 176, "finit_module": 313, "fsconfig": 431,
    "init_module": 175, "inotify_init": 253, "inotify_init1": 294, "io_setup": 206, "io_uring_enter": 426,
    "io_uring_register": 427, "io_uring_setup": 425, "ioprio_set": 251, "kcmp": 312, "keyctl": 250,
    "landlock_create_ruleset": 444, "memfd_create": 319, "memfd_secret": 447, "migrate_pages": 256, "mount": 165,
    "mount_setattr": 442, "move_pages": 279, "mq_open": 240, "mq_unlink": 241, "msgctl": 71, "msgget": 68,
    "msgrcv": 70, "msgsnd": 69, "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428,
    "perf_event_open": 298, "personality": 135, "pidfd_getfd": 438, "process_madvise": 440, "process_vm_readv": 310,
    "process_vm_writev": 311, "ptrace": 101, "quotactl": 179, "quotactl_fd": 443, "request_key": 249,
    "sched_setaffinity": 203, "sched_setattr": 314, "sched_setparam": 142, "sched_setscheduler": 144, "semctl": 66,
    "semget": 64, "semop": 65, "semtimedop": 220, "setns": 308, "setpriority": 141, "setsockopt": 54,
    "settimeofday": 164, "shmat": 30, "shmctl": 31, "shmget": 29, "socket": 41, "swapon": 167, "umount2": 166,
    "unshare": 272, "userfaultfd": 323, "vmsplice": 278,
}  # fmt: skip
REFUSED_WITHOUT_NAMESPACES = {
    "chmod": 90, "chown": 92, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "fchown": 93, "fchownat": 260,
    "fremovexattr": 199, "fsetxattr": 190, "futimesat": 261, "kill": 62, "lchown": 94, "lremovexattr": 198,
    "lsetxattr": 189, "pidfd_send_signal": 424, "prlimit64": 302, "removexattr": 197, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297, "setxattr": 188, "tgkill": 234, "tkill": 200, "truncate": 76, "utime": 132,
    "utimensat": 280, "utimes": 235,
}  # fmt: skip


@X86
@pytest.mark.parametrize("way", WAYS)
def test_system_calls_are_refused_before_their_arguments_are_looked_at(way):
    """Each is made with arguments of -1, for which the kernel itself would find another fault."""
    calls = REFUSED if way == "namespaces" else REFUSED | REFUSED_WITHOUT_NAMESPACES
    source = f"""{ATTEMPT}
for name, number in {calls!r}.items():
    done = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    said[name] = os.strerror(ctypes.get_errno()) if done == -1 else done
{SAY}"""
    execution = run(source, way)
    refusals = json.loads(execution.stdout)
    assert refusals.keys() == calls.keys()
    assert {name: output for name, output in refusals.items() if output != "Operation not permitted"} == {}


@pytest.mark.parametrize("way", WAYS)
def test_sockets_are_pairs_of_streams(way):
    """A datagram socket could send to any name: to another program's, or to a service of this machine."""
    source = f"""{ATTEMPT}
for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_SEQPACKET"):
    attempt(kind, lambda: len(socket.socketpair(socket.AF_UNIX, getattr(socket, kind))))
attempt("close on exec", lambda: len(socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)))
attempt("TIPC", socket.socketpair, 30, socket.SOCK_STREAM)
one, other = socket.socketpair()
attempt("bind", one.bind, chr(0) + "name")
attempt("connect", one.connect, chr(0) + "name")
one.setblocking(False)
attempt("flags", fcntl.fcntl, one, fcntl.F_SETFL, os.O_NONBLOCK)
import asyncio
attempt("asyncio", asyncio.run, asyncio.sleep(0, "ran"))
{SAY}"""
    denied = dict.fromkeys(("SOCK_DGRAM", "SOCK_SEQPACKET", "TIPC", "bind", "connect"), "PermissionError")
    works = {"SOCK_STREAM": "2", "close on exec": "2", "flags": "0", "asyncio": "'ran'"}
    assert json.loads(run(source, way).stdout) == denied | works


@pytest.mark.parametrize("version", [1, 5])
def test_landlock_holds_on_old_kernels_what_it_promises(version, tmp_path, monkeypatch):
    """The server takes the kernel's Landlock for an old version, which knows no limits on signals, truncation, devices.

    The files attacked lie in a package that programs may read, and belong to the one whom programs run as here.
    """
    package = tmp_path / "offered"
    package.mkdir()
    victim_file = package / "__init__.py"
    victim_file.write_text("x = 5")
    as_old = f"from jail import confined; confined.landlock_version = lambda: {version}; from jail.server import main"
    changed = sandbox_module._SERVER.replace("from jail.server import main", as_old)
    assert changed != sandbox_module._SERVER
    monkeypatch.setattr(sandbox_module, "_SERVER", changed)
    monkeypatch.syspath_prepend(tmp_path)
    abstract = f"envgym-test-{os.getpid()}-{version}"
    source = f"""{ATTEMPT}
FILE = {str(victim_file)!r}
attempt("read", lambda: open(FILE).read())
attempt("truncate by reading", os.open, FILE, os.O_RDONLY | os.O_TRUNC)
attempt("truncate by neither", os.open, FILE, os.O_ACCMODE | os.O_TRUNC)
attempt("open for ioctl", os.open, "/dev/null", os.O_ACCMODE)
attempt("own files", lambda: [open("x", mode).close() for mode in ("w", "r+", "a", "w+")])
fd = os.open(FILE, os.O_RDONLY)
attempt("set an attribute", os.setxattr, fd, "user.x", b"1")
attempt("flags of the file", fcntl.ioctl, fd, 0x40086602, b"12345678")
one, other = socket.socketpair()
pid = int(input())
attempt("owner", fcntl.fcntl, one, fcntl.F_SETOWN, pid)
attempt("owner, long form", fcntl.fcntl, one, 15, (1).to_bytes(4, "little") + pid.to_bytes(4, "little"))
attempt("owner by ioctl", fcntl.ioctl, one, 0x8901, pid.to_bytes(4, "little"))
attempt("group by ioctl", fcntl.ioctl, one, 0x8902, pid.to_bytes(4, "little"))
attempt("signal", fcntl.fcntl, one, 10, 9)
attempt("signals on", fcntl.fcntl, one, fcntl.F_SETFL, os.O_ASYNC)
attempt("signals on by ioctl", fcntl.ioctl, one, 0x5452, (1).to_bytes(4, "little"))
other.send(b"x")
attempt("another process", os.kill, pid, 0)
attempt("stream", socket.socket, socket.AF_UNIX)
def send():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return pair[0].sendto(b"x", chr(0) + {abstract!r})
attempt("datagram", send)
{SAY}"""

    async def main():
        sandbox = Sandbox(LIMITS, packages=["offered"])
        sandbox._ways = ("confined",)
        async with sandbox:
            return await sandbox.run(source, f"{victim.pid}\n")

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with listener, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        listener.bind(f"\0{abstract}")
        listener.setblocking(False)
        execution = asyncio.run(main())
        output = json.loads(execution.stdout)
        works = {name: output.pop(name) for name in ("read", "own files")}
        assert victim.poll() is None
        victim.communicate(b"\n")
        with pytest.raises(BlockingIOError):
            listener.recv(1)
    assert works == {"read": "'x = 5'", "own files": "[None, None, None, None]"}
    assert set(output.values()) == {"PermissionError"}, output
    assert victim_file.read_text() == "x = 5"
    assert os.listxattr(victim_file) == []


def test_the_cpu_time_of_children_whose_end_is_ignored_counts():
    source = """
import os, signal, time
try:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError as error:
    print(error, flush=True)
for _ in range(30):
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError: pass
"""
    execution = run(source, "namespaces", LIMITS.model_copy(update={"cpu_seconds": 0.5}))
    assert execution.reason == "timeout", execution


@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_holds_each_process_to_its_limits(way):
    source = f"""{ATTEMPT}
import resource
for name in dir(resource):
    if name.startswith("RLIMIT_"): said[name.removeprefix("RLIMIT_")] = resource.getrlimit(getattr(resource, name))
def write():
    with open("x", "wb", 0) as file:
        for _ in range(5): file.write(bytes(2**20))
attempt("a large file", write)
{SAY}"""
    output = json.loads(run(source, way).stdout)
    expected = {
        "CPU": [2, 3], "AS": [2**28, 2**28], "FSIZE": [2**22, 2**22], "NOFILE": [32, 32], "CORE": [0, 0],
        "MEMLOCK": [0, 0], "MSGQUEUE": [0, 0], "RTPRIO": [0, 0], "STACK": [2**23, 2**26], "a large file": "OSError",
    }  # fmt: skip
    if way == "namespaces":
        expected["NPROC"] = [9, 9]  # process 1 is one of them
    assert {name: output[name] for name in expected} == expected


UNREADABLE = """
import os, sys
sys.path.append(sys.argv[1])
from jail.confined import program_folder
from jail.program import HostPaths
with program_folder(HostPaths(sys.executable, (), (), {}, sys.argv[2])) as path:
    os.makedirs(path + "/work/a/b/c")
    os.symlink(sys.argv[3], path + "/work/a/link")
    for name in ("a/b/c", "a/b", "a"):
        os.chmod(path + "/work/" + name, 0o300)
"""


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/usr/bin/python3"), reason="no Python for every user")
def test_folders_that_cannot_be_read_are_removed_too(tmp_path):
    """As an ordinary user, for root may read everything. What a link leads to keeps its mode."""
    python, user_options = (sys.executable, {}) if os.geteuid() else ("/usr/bin/python3", {"user": 4321, "group": 4321})
    place, target, code = (Path(f"{tmp_path}/{name}") for name in ("place", "target", "code"))
    for path in (place, target, code / "jail"):
        path.mkdir(parents=True)
    for file in Path(jail.__file__).parent.glob("*.*"):
        (code / "jail" / file.name).write_bytes(file.read_bytes())
    if user_options:
        for path in (place, target):
            os.chown(path, 4321, 4321)
        for parent in (tmp_path, *tmp_path.parents):
            if parent.name.startswith(("pytest-", "popen-", "test_")):
                parent.chmod(0o755)
    target.chmod(0o500)
    command = [python, "-B", "-c", UNREADABLE, str(code), str(place), str(target)]
    execution = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **user_options)
    assert execution.returncode == 0, execution.stderr
    assert os.listdir(place) == []
    assert target.stat().st_mode & 0o777 == 0o500
