"""Files and folders that stay whole: one writer at a time, content replaced in one rename, names that outlive a power
failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import RunError, reported_as


def cache_folder(kind: str) -> Path:
    """Folder for what is made or fetched once and used again: in $ENVGYM_CACHE, by default in ~/.cache/envgym."""
    return Path(os.environ.get("ENVGYM_CACHE", "~/.cache/envgym")).expanduser() / kind


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Keep other processes of this machine out of `folder`; the lock of a process that dies is gone. Raises `RunError`,
    which says that another `what` is there, where one is."""
    with reported_as(RunError, f"{folder} cannot be written"):
        lock = (folder / "lock").open("a", encoding="utf-8")  # which leaves the times of a finished run as they are
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait until it ends, or stop it with Ctrl-C"
            raise RunError(f"another {what} is writing to {folder}: {advice}") from None
        times = os.fstat(lock.fileno())
        lock.truncate(0)
        lock.write(f"{socket.gethostname()} (process {os.getpid()}) since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        os.utime(lock.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))  # a finished run stays as old as it is
        yield


def holder(folder: Path) -> str | None:
    """The process that keeps others out of `folder` (machine, process, since when); None where none does."""
    try:
        # What a stranger put there instead, a pipe or a link, is not waited for, and not followed.
        with open(os.open(folder / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read() or "elsewhere"
    except OSError:
        pass
    return None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader sees the old or the new, never a part."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` in one rename at the end; where that fails, `path` stays what it
    was."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk is full: not with this
        raise


@contextlib.contextmanager
def unfinished(final: Path) -> Iterator[Path]:
    """A folder to make `final` in, which lies beside it and is deleted at the end. So are those that processes of this
    machine have left beside it that were killed."""
    suffix = f"{socket.gethostname()}.{{}}.unfinished"
    for abandoned in final.parent.glob(f"*.{suffix.format('*')}"):
        if not Path("/proc", abandoned.name.split(".")[-2]).exists():
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = final.with_name(f"{final.name}.{suffix.format(os.getpid())}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        if final.is_relative_to(cache_folder("")):
            reason = f"{error.strerror}; name a folder that can be with ENVGYM_CACHE=FOLDER"
            raise RunError(f"{final.parent} cannot be written: {reason}") from None
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Give a folder that is whole its name, unless another process has made the same meanwhile."""
    try:
        os.replace(folder, final)
    except OSError:
        if not final.is_dir():
            raise


def flush_to_disk(folder: Path, *, deep: bool = True) -> None:
    """Return once what is in `folder` would survive a power failure: the names in it and, with `deep`, all content."""
    paths = [folder, *folder.rglob("*")] if deep else [folder]
    for path in paths:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
