"""What has arrived of messages and bodies that are not whole yet: bounded for the process, not for a connection alone.

Connections are many, and whoever opens them need not finish anything.
"""

from __future__ import annotations

import itertools
from typing import ClassVar
from weakref import WeakSet

MAX_ARRIVING = 2**28
"""Bytes of all that is not whole yet, in this process."""


class Arriving:
    """What there is so far of one message of at most `most` bytes.

    Where all together are too much, the one that has been waiting for its next part the longest is given up.
    """

    _begun: ClassVar[WeakSet[Arriving]] = WeakSet()
    _order: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts = bytearray()
        self._last = 0
        self._is_lost = False

    def add(self, part: bytes | memoryview) -> None:
        """Append a part. Raises `OverflowError` where the message is too large, `BufferError` where it was given up."""
        if len(self._parts) + len(part) > self._most:
            raise OverflowError(f"it has more than {self._most} bytes")
        self._last = next(self._order)
        self._begun.add(self)
        while sum(len(each._parts) for each in self._begun) + len(part) > MAX_ARRIVING:
            min(self._begun, key=lambda each: each._last)._give_up()
        if self._is_lost:
            raise BufferError("too much arrives at once")
        self._parts += part

    def whole(self) -> bytes:
        """All of it; the next message may follow."""
        whole, self._parts = bytes(self._parts), bytearray()
        self._begun.discard(self)
        return whole

    def _give_up(self) -> None:
        self._is_lost, self._parts = True, bytearray()
        self._begun.discard(self)
