"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from .errors import RunError


@contextlib.contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Nobody else is in `folder` meanwhile, on this machine; a process that dies lets go of it. Raises `RunError`,
    which says that another `what` is there, where somebody is."""
    try:
        lock = (folder / "lock").open("a")  # which leaves the times of a finished run as they are
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another {what} is writing to {folder}") from None
        yield
