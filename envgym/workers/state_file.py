"""A file of a checkpoint: tensors and plain values. Reading one runs no code, whoever it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from envgym.errors import CheckpointDamaged


def write(path: Path, state: Any) -> None:
    """Write `state`, so that `read` gives it back."""
    torch.save(state, path)


def read(path: str | Path, map_location: Any = None, *, also: Sequence[type] = ()) -> Any:
    """What the file holds; classes other than torch's own are known only where they are in `also`.

    Raises `CheckpointDamaged` in one line where it is missing, cut short or garbage, or would run code.
    """
    try:
        with torch.serialization.safe_globals(list(also)):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch tells of a bad file in a dozen ways, most of them a page long
        raise CheckpointDamaged(f"{path} cannot be read ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError):
        return error.strerror or text
    for known in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        if known in text:
            return f"it names {text.partition(known)[2].split()[0]}, which would be code to run"
    return f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else 'no reason given'}"[:200]
