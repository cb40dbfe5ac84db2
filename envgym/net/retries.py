"""The retry policy: the pause before each retry, and the longest pause that a server may ask for."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Iterator

LONGEST_PAUSE = 60.0
"""The longest pause in seconds that a server may ask for (`Retry-After`); with a longer one the request fails."""
WAITS: dict[str, float] = {}
"""The servers that cannot be reached, each with the `time.monotonic()` until which requests wait for it."""
RETRY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses of transient failures, of a server or of a proxy before it."""


def pauses(first: float, longest: float = LONGEST_PAUSE, *, jitter: float = 0.0) -> Iterator[float]:
    """Seconds before the second try, the third, …: doubled each time up to `longest`, and shortened at random by up to
    the fraction `jitter`, so that clients that failed together do not retry together."""
    pause = first
    while True:
        yield pause * (1 - jitter * random.random())
        pause = min(2 * pause, longest)


def retry_after(value: str) -> float:
    """Seconds that a `Retry-After` header (seconds or a date) asks for; 0 for an invalid one."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
