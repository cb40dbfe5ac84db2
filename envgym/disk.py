"""Files and folders that survive a kill: one writer at a time, content replaced in one rename, flushed to disk."""

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
    """Folder for reusable files of a kind: in $ENVGYM_CACHE, by default in ~/.cache/envgym."""
    return Path(os.environ.get("ENVGYM_CACHE", "~/.cache/envgym")).expanduser() / kind


def regular_file(path: Path) -> Path:
    """The path, if a regular file is there, or a link to one. Raises `OSError` otherwise: a pipe would block its
    reader, and a device has no end."""
    if not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return path


def unused_folder(parent: Path, *names: str) -> Path:
    """The path of a folder that does not exist, named after `names`, the time and this process."""
    name = "-".join([*names, time.strftime("%Y%m%d-%H%M%S"), str(os.getpid())])
    folder, number = parent / name, 1
    while folder.exists():  # made by this process in the same second
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


@contextlib.contextmanager
def folder_lock(folder: Path, writer: str) -> Iterator[None]:
    """Keep other processes of this machine out of `folder`; a lock ends with its process. Raises `RunError` if another
    process has it; `writer` is what the message calls that process."""
    with reported_as(RunError, f"{folder} cannot be written"):
        lock = (folder / "lock").open("a", encoding="utf-8")  # appending changes no times
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait until it ends, or stop it with Ctrl-C"
            raise RunError(f"another {writer} is writing to {folder}: {advice}") from None
        times = os.fstat(lock.fileno())
        lock.truncate(0)
        lock.write(f"{socket.gethostname()} (process {os.getpid()}) since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        os.utime(lock.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))  # a finished run stays as old as it is
        yield


def lock_holder(folder: Path) -> str | None:
    """The process that has locked `folder` (machine, process id, time), if any."""
    try:
        # It may be a stranger's pipe or link: do not wait for it or follow it.
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
    with replacement_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacement_file(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary file, which replaces `path` in one rename at the end; after an error `path` is unchanged. Its name
    ends in `suffix`: a unique one for a path that several processes may write at once."""
    temporary = path.with_name(path.name + suffix)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def work_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final`, to build it in. It is deleted at the end, as are those of killed processes of
    this machine."""
    suffix = f"{socket.gethostname()}.{{}}.unfinished"
    for abandoned in final.parent.glob(f"*.{suffix.format('*')}"):
        if not Path("/proc", abandoned.name.split(".")[-2]).exists():
            shutil.rmtree(abandoned, ignore_errors=True)
    folder = final.with_name(f"{final.name}.{suffix.format(os.getpid())}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        if final.is_relative_to(cache_folder("")):
            reason = f"{error.strerror}; name a writable folder with ENVGYM_CACHE=FOLDER"
            raise RunError(f"{final.parent} cannot be written: {reason}") from None
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Rename a complete folder to `final`, unless another process has made the same meanwhile."""
    try:
        os.replace(folder, final)
    except OSError:
        if not final.is_dir():
            raise


def flush_to_disk(folder: Path, *, recursive: bool = True) -> None:
    """Flush the names in `folder` and, if `recursive`, all content, so that they survive a power failure."""
    paths = [folder, *folder.rglob("*")] if recursive else [folder]
    for path in paths:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
