"""The one policy for further tries: how long to pause before each, and how long a server may ask to wait."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Iterator

LONGEST_PAUSE = 60.0
"""Seconds that a server may ask to wait (`Retry-After`) before it is given up on."""
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses of a server, or of a proxy before it, that cannot answer just now."""


def pauses(first: float, longest: float = LONGEST_PAUSE, *, jitter: float = 0.0) -> Iterator[float]:
    """Seconds before the second try, the third, …: doubled each time up to `longest`, and shortened at random by up to
    the share `jitter`, so that many who failed together do not come again together."""
    pause = first
    while True:
        yield pause * (1 - jitter * random.random())
        pause = min(2 * pause, longest)


def retry_after(value: str) -> float:
    """Seconds that a `Retry-After` header (seconds or a date) asks for; 0 where it says nothing usable."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
