"""Marks that outlive a process: the instance whose code runs in it, in a file of eight bytes."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_NUMBER = struct.Struct("q")
NONE = -1
"""No instance's code runs on the event loop. Threads may run some."""


class Marks:
    """The marks of this process in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / str(os.getpid()), os.O_CREAT | os.O_WRONLY)
        self.set(NONE)

    def set(self, instance: int) -> None:
        os.pwrite(self._file, _NUMBER.pack(instance), 0)


def may_have_ended(folder: Path, pid: int, instance: int) -> bool:
    """True if a process may have died by the code of this instance: it ran then, or it is not known which did. That is
    so without a file (of another machine), and with one that holds no mark, which code may have written."""
    content = b""
    with (
        contextlib.suppress(OSError),
        open(folder / str(pid), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file,
    ):
        content = file.read(_NUMBER.size + 1) or b""
    return len(content) != _NUMBER.size or _NUMBER.unpack(content)[0] in (instance, NONE)


class Marked(Generic[T]):
    """Awaits a coroutine of an instance, which is marked while its code runs, and not while it waits."""

    def __init__(self, call: Coroutine[Any, Any, T], marks: Marks, instance: int) -> None:
        self._call, self._marks, self._instance = call, marks, instance

    def __await__(self) -> Generator[Any, Any, T]:
        proceed: Any = self._call.send
        value: Any = None
        while True:
            self._marks.set(self._instance)
            try:
                awaited = proceed(value)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._marks.set(NONE)
            try:
                value = yield awaited
                proceed = self._call.send
            except BaseException as error:
                proceed, value = self._call.throw, error
