"""The random generators that a whole process shares, and that no environment may touch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

State = dict[str, Any]


def state() -> State:
    """What each of them would draw next, as values that can be compared. Those of NumPy and PyTorch where something
    has imported these."""
    found: State = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = numpy.get_state()
        found["numpy.random"] = (kind, keys.tobytes(), *rest)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def seed(value: int) -> None:
    """Seed them all."""
    random.seed(value)
    seeders: list[tuple[str, Callable[[Any], Any]]] = [
        ("numpy.random", lambda module: module.seed(value)),
        ("torch", lambda module: module.manual_seed(value)),
    ]
    for name, seeder in seeders:
        if (module := sys.modules.get(name)) is not None:
            seeder(module)


def changed(before: State, after: State) -> list[str]:
    """Which of them have drawn something, or were seeded. One that was only imported meanwhile has not."""
    return [name for name, value in before.items() if after.get(name) != value]
