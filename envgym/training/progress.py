"""The progress of a stage, for its summary and for a resumed run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Progress:
    """`record` is the step's line of metrics, `recorded` whether it is written. `seconds` and `tokens` are those of the
    whole stage so far."""

    step: int = 0
    optimizer_steps: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    recorded: bool = False
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: {"sampled": 0, "trained": 0})
    max_mismatch: float = 0.0
    best: dict[str, Any] | None = None
    """The best checkpoint: `metric`, its `value` there, and `step`."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, which `asdict` made. Raises `TypeError` for that of another version."""
        restored = Progress(**state)
        for one in fields(self):
            setattr(self, one.name, getattr(restored, one.name))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time spent inside as the phase's, in this step's record (`seconds/PHASE`) and in the stage's."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - start
            key = f"seconds/{phase}"
            self.record[key] = self.record.get(key, 0.0) + seconds
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
