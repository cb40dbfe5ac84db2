"""Where there are no namespaces: Landlock for files, seccomp for everything else, and one process only.

A program here can see that files exist and how large they are, but open none outside its own folder; it starts no
process, and so leaves none behind, and signals none. None of this rests on the kernel's version of Landlock: the
filter of system calls is as strict as the oldest needs it to be. Its folder is in the system's temporary one, where
each file is limited in size but not all of them together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from . import landlock, linux, seccomp
from .program import NOBODY, Host, Program, Streams, connect, environment, execute, limit, reset_signals, write_files

_DEVICES = ("/dev/random", "/dev/urandom")


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
    landlock.restrict(readable, (f"{path}/work", f"{path}/tmp", "/dev/null"), host.hidden)
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
    """Whether this is root, and Python lies where every user can run it."""
    if os.geteuid() != 0:
        return False
    paths = [host.python]
    while paths[-1] != "/":
        paths.append(os.path.dirname(paths[-1]))
    return all(os.stat(path).st_mode & 0o001 for path in paths)
