"""Escapes and abuses tried on the sandbox, in both its kinds of isolation, each with its outcome.

Every program says ESCAPED where it got what it was after. What it did get instead is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from envgym.envs.code.cases import read_cases
from envgym.envs.code.grading import grade
from envgym.sandbox import Execution, Limits, Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WAYS = {"namespaces": ("root", "user"), "landlock": ("confined",)}
LIMITS = Limits(
    cpu_seconds=1, wall_seconds=4, memory_mb=256, output_kb=64, disk_mb=4, files=200, open_files=32, processes=8
)
OUTCOMES: dict[str, dict[str, Any]] = {}

PREAMBLE = """
import ctypes, os, signal, socket, struct, sys, time
def attempt(what, *arguments, **named):
    "Say that it worked, or how it did not."
    try:
        result = what(*arguments, **named)
    except BaseException as error:
        print(type(error).__name__, error)
        return None
    print("ESCAPED" if result != -1 else "refused")
    return result
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    "A system call by its number on x86_64."
    result = libc.syscall(number, *arguments)
    print("ESCAPED" if result >= 0 else os.strerror(ctypes.get_errno()))
"""


@dataclasses.dataclass(frozen=True)
class Abuse:
    """A program, what is expected of it, and the reasons it may end for."""

    expected: str
    source: str
    reasons: tuple[str, ...] = ("ok", "error")
    only: str = ""
    """The kind of isolation under which it is tried; empty for both."""
    limits: Limits = LIMITS


# -- using up what there is -------------------------------------------------------------------------------


def patient(**changes: Any) -> Limits:
    """Limits of which another than the wall time is to be met first, on a busy machine too."""
    return LIMITS.model_copy(update={"wall_seconds": 30.0, **changes})


EXHAUSTION = {
    "endless loop": Abuse("ended at the CPU limit", "while True: pass", ("timeout",), limits=patient()),
    "sleeping": Abuse("ended at the wall limit", "time.sleep(1000)", ("timeout",)),
    "stopping itself": Abuse("ended at the wall limit", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    "busy threads": Abuse(
        "their CPU time counts together",
        """
import threading
def busy():
    while True: pass
for _ in range(6): threading.Thread(target=busy).start()
""",
        ("timeout",),
        limits=patient(),
    ),
    "busy processes": Abuse(
        "their CPU time counts together",
        "for _ in range(3): os.fork()\nwhile True: pass",
        ("timeout",),
        limits=patient(),
    ),
    "fork bomb": Abuse(
        "no more processes than allowed, all gone afterwards",
        """
while True:
    try: os.fork()
    except OSError: pass
""",
        ("timeout",),
        limits=patient(),
    ),
    "fork and exit, again and again": Abuse(
        "ended at the CPU limit",
        """
while True:
    if os.fork() == 0: os._exit(0)
    os.wait()
""",
        ("timeout",),
        limits=patient(),
    ),
    "thread bomb": Abuse(
        "refused",
        """
import threading
forever = threading.Event()
while True: threading.Thread(target=forever.wait, daemon=True).start()
""",
        ("error", "memory"),
    ),
    "memory bomb": Abuse("MemoryError", "x = []\nwhile True: x.append(bytearray(2**20))", ("memory",)),
    "memory bomb that goes on": Abuse(
        "ended at a limit",
        """
x = []
while True:
    try: x.append(bytearray(2**20))
    except MemoryError: pass
""",
        ("timeout", "memory"),
        limits=patient(),
    ),
    "memory bomb of several processes": Abuse(
        "their memory counts together",
        """
for _ in range(3):
    if os.fork() == 0: break
x = bytearray(100 * 2**20)
x[::4096] = bytes(25600)
time.sleep(20)
""",
        ("memory",),
        limits=patient(cpu_seconds=10.0),
    ),
    "memory that several processes share": Abuse(
        "refused, for it could not be counted", "import mmap\nattempt(mmap.mmap, -1, 2**20)"
    ),
    "memory in a file without a name": Abuse("refused", "attempt(os.memfd_create, 'x')"),
    "System V shared memory": Abuse("refused", "call(29, 0, 2**28, 0o1600)"),
    "message queues": Abuse("refused", "call(240, b'q', os.O_CREAT | os.O_RDWR, 0o600, None)\ncall(68, 0, 0o1600)"),
    "endless output": Abuse("ended, and cut at the limit", "while True: print('x' * 10_000)", ("output",)),
    "endless errors": Abuse("ended, and cut at the limit", "while True: os.write(2, b'x' * 10_000)", ("output",)),
    "endless output of several processes": Abuse(
        "ended, and cut at the limit",
        "for _ in range(2): os.fork()\nwhile True: os.write(1, b'x' * 10_000)",
        ("output",),
    ),
    "a huge file": Abuse(
        "refused at the limit",
        """
with open('x', 'wb') as file:
    for _ in range(100): file.write(bytes(2**20))
print('ESCAPED')
""",
    ),
    "a huge file with holes": Abuse("refused at the limit", "attempt(open('x', 'wb').truncate, 2**34)"),
    "thousands of files": Abuse(
        "refused at the limit",
        "for i in range(5000): open(str(i), 'w').close()\nprint('ESCAPED')",
        only="namespaces",
    ),
    "folders without end": Abuse(
        "refused at the limit",
        """
for i in range(5000):
    os.mkdir('d')
    os.chdir('d')
print('ESCAPED')
""",
        only="namespaces",
    ),
    "filling /tmp": Abuse(
        "refused at the limit",
        "for i in range(50): open(f'/tmp/{i}', 'wb').write(bytes(2**20))\nprint('ESCAPED')",
    ),
    "filling /dev/shm": Abuse(
        "refused at the limit",
        "for i in range(50): open(f'/dev/shm/{i}', 'wb').write(bytes(2**20))\nprint('ESCAPED')",
    ),
    "all file descriptors": Abuse(
        "refused at the limit", "x = [open('/dev/null') for _ in range(1000)]\nprint('ESCAPED')"
    ),
    "pipes full of data": Abuse(
        "refused at the limit",
        """
import fcntl
for _ in range(1000):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 2**20)
    os.write(writer, bytes(2**20))
print('ESCAPED')
""",
    ),
    "pages given to pipes": Abuse(
        "refused, for they could not be counted",
        """
import mmap
reader, writer = os.pipe()
pages = mmap.mmap(-1, 2**22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
place = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 4096)
call(278, writer, place, 1, 0)
""",
    ),
    "queues of inotify": Abuse("refused, for they could not be counted", "call(253)\ncall(294, 0)"),
    "rules without end": Abuse("refused, for they could not be counted", "call(444, struct.pack('Q', 1), 8, 0)"),
    "processes whose end nobody waits for": Abuse(
        "their CPU time counts together",
        """
try: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
except OSError as error: print(error)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
""",
        ("timeout",),
        limits=patient(),
    ),
    "deep recursion": Abuse("RecursionError", "def f(): f()\nf()", ("error",)),
    "deep recursion without a limit": Abuse(
        "ended by an error or a limit",
        """
sys.setrecursionlimit(10**9)
class A:
    def __repr__(self): return repr(self)
repr(A())
""",
        ("error", "memory", "timeout"),
    ),
    "a segmentation fault": Abuse("ended by it", "ctypes.string_at(0)", ("error",)),
    "a huge number as text": Abuse("ValueError", "str(10**100_000)", ("error",)),
    "a huge power": Abuse("ended at a limit", "x = 10 ** 10 ** 10", ("timeout", "memory"), limits=patient()),
    "a compile bomb": Abuse("ended by an error or a limit", "exec('-' * 10**6 + '1')", ("error", "memory", "timeout")),
    "a constant too large": Abuse(
        "ended at a limit",
        "exec('x = (' + '(0,) * 10**5,' * 10**5 + ')')",
        ("error", "memory", "timeout"),
        limits=patient(),
    ),
    "a zip bomb": Abuse(
        "MemoryError",
        """
import zlib
packer = zlib.compressobj(1)
small = b''.join(packer.compress(bytes(2**20)) for _ in range(300)) + packer.flush()
zlib.decompress(small)
print('ESCAPED')
""",
        ("memory",),
        limits=patient(cpu_seconds=20.0),
    ),
    "a regular expression without end": Abuse(
        "ended at the CPU limit", "import re\nre.match('(a+)+$', 'a' * 100 + 'b')", ("timeout",), limits=patient()
    ),
    "a loop that ignores signals": Abuse(
        "ended at the CPU limit",
        """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
        ("timeout",),
        limits=patient(),
    ),
    "raising its own limits": Abuse(
        "refused",
        """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    attempt(resource.setrlimit, kind, (2**40, 2**40))
""",
    ),
    "a higher priority": Abuse(
        "refused",
        """
attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10))
attempt(os.nice, -5)
attempt(os.setpriority, os.PRIO_PROCESS, 0, -5)
""",
    ),
}

# -- getting out ------------------------------------------------------------------------------------------
# Nothing here would do harm if it succeeded: what is attacked is the test's own.

ESCAPES = {
    "reading /etc/passwd": Abuse(
        "there is none", "for name in ('passwd', 'shadow', 'hostname'): attempt(open, f'/etc/{name}')"
    ),
    "reading the user's files": Abuse("not there", "attempt(open, SECRET)"),
    "listing the user's folders": Abuse("not there", "attempt(os.listdir, FOLDER)\nattempt(os.listdir, '/home')"),
    "reading through a symbolic link": Abuse("not there", "os.symlink(SECRET, 'link')\nattempt(open, 'link')"),
    "reading through ..": Abuse("not there", "attempt(open, '../' * 20 + SECRET)"),
    "reading through a hard link": Abuse("not there", "attempt(os.link, SECRET, 'link')"),
    "changing the user's files": Abuse(
        "refused",
        """
attempt(os.chmod, SECRET, 0)
attempt(os.utime, SECRET, (0, 0))
attempt(os.truncate, SECRET, 0)
attempt(open, SECRET, 'a')
""",
    ),
    "removing the user's files": Abuse("refused", "attempt(os.unlink, SECRET)\nattempt(os.rename, SECRET, 'mine')"),
    "writing outside its folder": Abuse(
        "refused",
        """
for path in ('/x', '/usr/lib/x', '/dev/x', '/etc/x', '/proc/x', os.__file__, sys.executable, FOLDER + '/x'):
    attempt(open, path, 'a')
""",
    ),
    "reading installed packages": Abuse(
        "no file can be opened",
        """
for path in list(sys.path):
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path + '/site-packages') for name in names)
    for _, file in zip(range(20), files): attempt(open, file)
""",
    ),
    "the environment of process 1": Abuse("not there", "attempt(open, '/proc/1/environ', 'rb')"),
    "the environment of its parent": Abuse(
        "not there", "attempt(open, f'/proc/{os.getppid()}/environ', 'rb')\nattempt(os.listdir, '/proc')"
    ),
    "variables that leak": Abuse("not there", "print('ESCAPED' if 'hunter2' in str(os.environ) else 'clean')"),
    "file descriptors that leak": Abuse(
        "only the three",
        """
for number in range(3, 2000):
    try: os.fstat(number)
    except OSError: continue
    print('ESCAPED', number)
""",
    ),
    "reading devices": Abuse(
        "not there",
        "for name in ('vda', 'sda', 'mem', 'kmsg', 'nvidia0', 'fuse', 'kvm', 'vsock'): attempt(open, f'/dev/{name}')",
    ),
    "making a device": Abuse("refused", "attempt(os.mknod, 'disk', 0o60600, os.makedev(254, 0))"),
    "connecting to this machine": Abuse("refused", "attempt(socket.create_connection, ('127.0.0.1', PORT), 2)"),
    "looking a name up": Abuse("refused", "attempt(socket.getaddrinfo, 'example.invalid', 80)"),
    "sockets of other kinds": Abuse(
        "refused",
        "for family, kind in ((2, 2), (10, 1), (1, 1), (16, 3), (17, 3), (40, 1), (38, 5)):\n"
        "    attempt(socket.socket, family, kind)",
    ),
    "an abstract socket of this machine": Abuse(
        "refused",
        """
def connect():
    with socket.socket(socket.AF_UNIX) as unix: unix.connect(chr(0) + ABSTRACT)
attempt(connect)
""",
    ),
    "datagrams to anybody": Abuse(
        "refused",
        """
def send():
    with socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0] as one: one.sendto(b'x', chr(0) + ABSTRACT)
attempt(send)
attempt(socket.socketpair()[0].bind, chr(0) + 'meet me')
""",
    ),
    "signals sent by a descriptor": Abuse(
        "nobody else is hurt",
        """
import fcntl
one, other = socket.socketpair()
for what in ((fcntl.F_SETOWN, VICTIM), (10, 9), (fcntl.F_SETFL, os.O_ASYNC)):
    try: print(fcntl.fcntl(one, *what))
    except OSError as error: print(error)
other.send(b'x')
""",
    ),
    "killing its parent": Abuse(
        "nobody else is hurt",
        """
for number in (2, 15, 19, 9):
    try: os.kill(os.getppid(), number)
    except OSError as error: print(error)
""",
    ),
    "signalling everybody": Abuse("there is nobody else", "attempt(os.kill, -1, 0)"),
    "killing a process of this machine": Abuse("no such process", "attempt(os.kill, VICTIM, 9)"),
    "tracing another process": Abuse(
        "refused",
        """
for process in (1, os.getppid(), VICTIM):
    call(101, 16, process, 0, 0)
    call(101, 0x4206, process, 0, 0)
""",
    ),
    "reading another's memory": Abuse(
        "refused",
        """
buffer = ctypes.create_string_buffer(64)
place = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 64)
for process in (1, os.getppid(), VICTIM): call(310, process, place, 1, place, 1, 0)
""",
    ),
    "taking another's file descriptors": Abuse(
        "refused",
        """
for process in (1, VICTIM):
    handle = libc.syscall(434, process, 0)
    for number in range(8): call(438, handle, number, 0)
""",
    ),
    "changing another's limits": Abuse(
        "refused",
        """
import resource
for process in (1, os.getppid(), VICTIM): attempt(resource.prlimit, process, resource.RLIMIT_CPU)
""",
    ),
    "becoming root": Abuse(
        "refused",
        """
if os.getuid() == 0: print('root in name, without rights')
else:
    for become in (os.setuid, os.setgid, os.seteuid): attempt(become, 0)
    attempt(os.setgroups, [0])
""",
    ),
    "rights of root": Abuse(
        "none, nor any to gain",
        """
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
print('ESCAPED' if any(data) else 'none', list(data))
print('ESCAPED' if any(libc.prctl(23, number, 0, 0, 0) == 1 for number in range(41)) else 'bounded')
print('ESCAPED' if libc.prctl(39, 0, 0, 0, 0) != 1 else 'no new ones')
""",
    ),
    "mounting": Abuse(
        "refused",
        """
call(165, b'tmpfs', b'.', b'tmpfs', 0, None)
call(166, b'/box', 2)
call(155, b'.', b'.')
call(428, -100, b'/', 1)
call(430, b'proc', 0)
call(442, -100, b'/', 0, None, 32)
""",
    ),
    "changing the root": Abuse("refused", "os.mkdir('jail')\nattempt(os.chroot, 'jail')"),
    "namespaces of its own": Abuse(
        "refused",
        """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000): call(272, flag)
call(56, 0x10000000 | 17, 0, 0, 0, 0)
call(435, ctypes.create_string_buffer(88), 88)
call(308, 0, 0)
""",
    ),
    "rare parts of the kernel": Abuse(
        "refused",
        """
call(321, 0, None, 0)
call(298, None, 0, 0, 0, 0)
call(425, 8, ctypes.create_string_buffer(120))
call(323, 0)
call(250, 0, -1, 0)
call(248, b'user', b'x', b'y', 1, -1)
call(304, 0, None, 0)
call(312, 1, 1, 0, 0, 0)
call(206, 8, ctypes.create_string_buffer(8))
""",
    ),
    "system calls of 32 bits": Abuse(
        "ended by a signal",
        """
PROT_ALL, PRIVATE_ANONYMOUS = 7, 0x22
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), PROT_ALL, PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))
ctypes.memmove(page, bytes.fromhex('b814000000cd80c3'), 8)
print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(page)())
""",
        ("error",),
    ),
    "system calls of the x32 kind": Abuse("no such call", "call(0x40000000 + 39)"),
    "what only a machine's owner does": Abuse(
        "refused",
        """
call(169, 0, 0, 0, 0)
call(164, None, None)
call(170, b'sandbox', 7)
call(167, b'nothing', 0)
call(103, 10, None, 0)
""",
    ),
    "programs that change users": Abuse(
        "not there",
        "for path in ('/bin/su', '/usr/bin/sudo', '/bin/sh', '/usr/bin/passwd'): attempt(os.execv, path, [path])",
    ),
    "a daemon that outlives it": Abuse(
        "gone with it",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 3)
        time.sleep(1000)
    os._exit(0)
os.wait()
""",
    ),
    "processes left in the background": Abuse(
        "gone with it, and nobody waits for them",
        """
import subprocess
for _ in range(3): subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'])
""",
    ),
    "files left for the next program": Abuse(
        "a new folder each time",
        """
for folder in ('/tmp', '/dev/shm', '.'):
    try:
        print('ESCAPED' if 'left' in os.listdir(folder) else 'empty')
        open(f'{folder}/left', 'w').close()
    except OSError as error: print(error)
""",
    ),
    "closing its output": Abuse("ended as usual", "os.closerange(0, 3)"),
    "binary garbage": Abuse("replaced", "os.write(1, bytes(range(256)) * 10)\nos.write(2, bytes([255]) * 100)"),
    "os._exit": Abuse("its exit status", "os._exit(0)"),
    "a core dump": Abuse("ended by the signal, no file", "os.abort()", ("error",)),
    "patched builtins": Abuse(
        "only its own", "import builtins\nbuiltins.open = builtins.print = None\nsys.modules.clear()"
    ),
}


def sandbox_by(way: str, limits: Limits = LIMITS) -> Sandbox:
    """A sandbox that has only this kind of isolation to choose from."""
    sandbox = Sandbox(limits)
    sandbox._ways = WAYS[way]
    return sandbox


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclasses.dataclass
class Bystanders:
    """What is on this machine to be got at."""

    secret: Path
    port: int
    abstract: str
    victim: int
    connections: list[Any]

    @property
    def names(self) -> str:
        """Python source that tells a program where to find them."""
        places = {
            "SECRET": str(self.secret), "FOLDER": str(self.secret.parent), "PORT": self.port,
            "ABSTRACT": self.abstract, "VICTIM": self.victim,
        }  # fmt: skip
        return "".join(f"{name} = {place!r}\n" for name, place in places.items())


@pytest.fixture(scope="module")
def bystanders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bystanders]:
    """A readable file, listeners on the loopback interface and an abstract address, a process, a variable, a file
    descriptor that is inherited."""
    secret = tmp_path_factory.mktemp("user") / "secret.txt"
    secret.write_text("hunter2")
    secret.chmod(0o644)
    connections: list[Any] = []

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connections.append(listener.accept())

    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        secret.open() as leaked,
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as victim,
    ):
        abstract = f"envgym-test-{os.getpid()}"
        unix.bind(f"\0{abstract}")
        unix.listen()
        os.set_inheritable(leaked.fileno(), True)
        os.environ["SECRET_TOKEN"] = "hunter2"
        for listener in (tcp, unix):
            threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield Bystanders(secret, tcp.getsockname()[1], abstract, victim.pid, connections)
        finally:
            del os.environ["SECRET_TOKEN"]
            victim.kill()
            for listener in (tcp, unix):
                listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def play(way: str, bystanders: Bystanders) -> Iterator[Callable[[str, Limits], Execution]]:
    sandboxes: dict[str, Sandbox] = {}

    def run(source: str, limits: Limits) -> Execution:
        key = limits.model_dump_json()
        if key not in sandboxes:
            sandboxes[key] = sandbox_by(way, limits)
        done = asyncio.run(sandboxes[key].run(source))
        assert sandboxes[key].isolation is not None
        assert sandboxes[key].isolation.kind == way
        assert no_program_is_left(sandboxes[key])
        return done

    yield run
    for sandbox in sandboxes.values():
        asyncio.run(sandbox.close())


def no_program_is_left(sandbox: Sandbox) -> bool:
    """Whether the server has no descendants; a supervisor may take a moment to end."""
    assert sandbox._server is not None
    server = psutil.Process(sandbox._server._process.pid)
    deadline = time.monotonic() + 5
    while left := server.children(recursive=True):
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.01)
    return True


def everybody_is_well(bystanders: Bystanders) -> bool:
    return (
        psutil.Process(bystanders.victim).status() != psutil.STATUS_ZOMBIE
        and bystanders.secret.read_text() == "hunter2"
        and bystanders.secret.stat().st_mode & 0o777 == 0o644
        and not bystanders.connections
    )


@pytest.mark.parametrize("name", EXHAUSTION)
def test_exhaustion(name: str, way: str, play: Callable[[str, Limits], Execution]) -> None:
    abuse = EXHAUSTION[name]
    if abuse.only not in ("", way):
        record(name, way, abuse.expected, "not limited")
        return
    resident = psutil.Process().memory_info().rss
    done = play(PREAMBLE + abuse.source, abuse.limits)
    record(name, way, abuse.expected, done)
    assert "ESCAPED" not in done.stdout
    # Under Landlock programs start no processes at all.
    reasons = ("error", "timeout") if way == "landlock" and "fork" in abuse.source else abuse.reasons
    assert done.reason in reasons, done.stderr[-500:]
    assert done.seconds < abuse.limits.wall_seconds + 3
    assert len(done.stdout) + len(done.stderr) <= abuse.limits.output_kb * 1024
    assert psutil.Process().memory_info().rss - resident < 50 * 2**20


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes(name: str, way: str, play: Callable[[str, Limits], Execution], bystanders: Bystanders) -> None:
    abuse = ESCAPES[name]
    if abuse.only not in ("", way):
        record(name, way, abuse.expected, "not tried")
        return
    for _ in range(2 if "next" in name else 1):
        done = play(PREAMBLE + bystanders.names + abuse.source, abuse.limits)
    record(name, way, abuse.expected, done)
    assert "ESCAPED" not in done.stdout
    assert done.reason in abuse.reasons, done.stderr[-500:]
    assert done.seconds < 5
    assert everybody_is_well(bystanders)


# -- forging the verdict ----------------------------------------------------------------------------------

SECRET_TESTS = [{"call": "f", "args": [number], "expected": f"secret {number * 7919}"} for number in range(3)]

FORGERIES = {
    "printing that all is well": "print('All tests passed.')\nprint('{\"value\": true}')\nprint('OK', '3 passed')",
    "ending with success": "import os\nos._exit(0)",
    "ending with success in a call": "import os\ndef f(x): os._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "ending with success at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return None",
    "an object equal to everything": "class E:\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "a number equal to everything": "class E(int):\n    def __eq__(self, o): return True\ndef f(x): return E(1)",
    "a text equal to everything": "class E(str):\n    def __eq__(self, o): return True\ndef f(x): return E('x')",
    "a list equal to everything": "class E(list):\n    def __eq__(self, o): return True\ndef f(x): return E()",
    "result lines of its own": """
import os
for fd in range(1, 64):
    try: os.write(fd, b'{"value": "secret", "passed": true}\\n' * 3)
    except OSError: pass
def f(x): return None
""",
    "patching the driver": """
import __main__, json
json.dumps = lambda *a, **k: '{"value": true, "passed": true}'
__main__._outcome = lambda *a: {'value': True}
__main__.encode = lambda v: True
def f(x): return None
""",
    "patching builtins": """
import builtins
builtins.all = builtins.isinstance = lambda *a: True
def f(x): return 1
""",
    "the expected results, from memory": """
import gc, sys
def f(x):
    texts, frame = [], sys._getframe()
    while frame:
        texts += map(repr, frame.f_locals.values())
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (list, dict, tuple)):
            try: texts.append(repr(thing))
            except Exception: pass
    text = ' '.join(texts)
    place = text.find('secret' + ' ')
    return text[place : place + 7 + len(str(x * 7919))] if place >= 0 else 'nothing found'
""",
    "the expected results, from files": """
import os
def f(x):
    text = ''
    for folder, _, names in os.walk('/box'):
        for name in names:
            text += open(os.path.join(folder, name)).read()
    text = text.replace('secr' + 'et', '')
    return 'secr' + 'et ' + text[-20:]
""",
    "the expected results, from our own code": """
import sys
def f(x):
    for path in list(sys.path): sys.path.append(path + '/site-packages')
    from envgym.envs.code import problems
    return problems
""",
    "brackets too deep to read": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'[' * 50_000 + b'\\n')
    except OSError: pass
""",
    "bytes that are no text": """
import os
for fd in range(3, 9):
    try: os.write(fd, b'\\xff\\n' * 9)
    except OSError: pass
""",
    "a number too long to read": """
import os
for fd in range(3, 9):
    try: os.write(fd, b'{"value": ' + b'9' * 6000 + b'}\\n')
    except OSError: pass
""",
    "results without end": "import itertools\ndef f(x): return [0] * 10**7",
    "a result that is no number": "def f(x): return float('nan')",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries(name: str, way: str) -> None:
    async def main() -> Any:
        async with sandbox_by(way) as sandbox:
            return await grade(sandbox, FORGERIES[name], read_cases(SECRET_TESTS))

    found = asyncio.run(main())
    record(name, way, "no test passes", found.feedback())
    assert found.share == 0


def test_a_forgery_that_succeeds(way: str) -> None:
    """Plain asserts share a process with the solution: this is what the documentation warns of."""
    forgery = """
import os, sys
frame = sys._getframe()
while "request" not in frame.f_locals: frame = frame.f_back
os.write(frame.f_locals["results"], frame.f_locals["request"]["token"].encode())
os._exit(0)
"""

    async def main() -> Any:
        async with sandbox_by(way) as sandbox:
            return await grade(sandbox, forgery, read_cases("x = f(1)\nassert x == 2"))

    assert asyncio.run(main()).passed
    name = "passing plain asserts, which run in the solution's process"
    record(name, way, "NOT PREVENTED: use tests of calls or of printed output", "passed")


# -- the record -------------------------------------------------------------------------------------------


def record(name: str, way: str, expected: str, outcome: Execution | str) -> None:
    if isinstance(outcome, Execution):
        said = (outcome.stdout.strip().splitlines() or outcome.stderr.strip().splitlines() or [""])[-1]
        outcome = f"{outcome.reason}, exit {outcome.exit}, {outcome.seconds:.2f} s: {said}".rstrip(": ")
    outcome = re.sub(r"(/+[\w.-]+){2,}", "PATH", outcome)[:150]
    OUTCOMES.setdefault(name, {"expected": expected})[way] = outcome.encode("ascii", "replace").decode()


def test_every_outcome_is_stored(store: Callable[..., None]) -> None:
    assert len(OUTCOMES) >= 30
    store("sandbox_abuse", tried=len(OUTCOMES), outcomes=OUTCOMES)
