"""A file of a checkpoint: tensors and plain values. Reading one runs no code, whoever it comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from envgym.errors import CheckpointDamaged, RunError, cannot_write


def write(path: Path, state: Any) -> None:
    """Write `state`, so that `read` gives it back. Raises `RunError` in one line where the disk is full."""
    with writing(path):
        torch.save(state, path)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """`torch.save` to `path` may go on within. Raises `RunError` in one line where the disk is full."""
    try:
        yield
    except OSError as error:
        if (said := cannot_write(error)) is None:
            raise
        raise RunError(said) from None
    except RuntimeError as error:
        if not any(known in str(error) for known in ("PytorchStreamWriter", "inline_container", "iostream error")):
            raise
        raise RunError(f"{path} cannot be written: is the disk full?") from None


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
    if isinstance(error, OSError) and error.filename:  # else it is about a place in the file that is not there
        return error.strerror or str(error)
    for known in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        if known in str(error):
            return f"it names {str(error).partition(known)[2].split()[0]}, which would be code to run"
    return "it is cut short or garbage"
