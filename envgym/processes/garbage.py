"""Python's collector of reference cycles in processes with many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS = 50_000
"""New objects after which they are searched for cycles. Python's 700 are a few turns: each search then finds only
objects of running episodes, and the searches take a sixth of the controller's time (`benchmarks/controller.py`)."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for cycles rarely, and never among the objects that exist now, which live to the end."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
