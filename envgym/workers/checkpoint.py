"""Files of a checkpoint: tensors and plain values. Reading a file never runs code from it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from envgym.errors import CheckpointDamaged, RunError, cannot_write


def write(path: str | Path, state: Any) -> None:
    """Write `state` for `read`. Raises a one-line `RunError` if the disk is full."""
    try:
        torch.save(state, path)
    except OSError as error:
        if (reason := cannot_write(error)) is None:
            raise
        raise RunError(reason) from None
    except RuntimeError as error:
        if not any(text in str(error) for text in ("PytorchStreamWriter", "inline_container", "iostream error")):
            raise
        raise RunError(f"{path} cannot be written: is the disk full?") from None


class Writer:
    """Writes files in a separate thread, from copies, so that the caller may change the state meanwhile."""

    def __init__(self) -> None:
        self.blocking = False
        """If True, `write` writes in the calling thread, without copies."""
        self._thread = ThreadPoolExecutor(1)
        self._files: list[Future[None]] = []

    def write(self, path: str | Path, state: Any) -> None:
        """Begin to write `state` to `path`, or write it if `blocking`."""
        if self.blocking:
            write(path, state)
        else:
            self._files.append(self._thread.submit(write, path, on_host(state)))

    async def finish(self) -> None:
        """Return once every file is written. Raises the first error of a write."""
        files, self._files = self._files, []
        await asyncio.gather(*map(asyncio.wrap_future, files))


def on_host(state: Any) -> Any:
    """A copy of nested values, with tensors in the host's memory; a repeated tensor (a tied head) is copied once."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map_only(torch.Tensor, copy, state)


def read(path: str | Path, map_location: Any = None, *, classes: Sequence[type] = (), mapped: bool = False) -> Any:
    """The contents of a file; classes other than torch's own must be listed in `classes`. `mapped`: tensors are read
    from disk on use.

    Raises a one-line `CheckpointDamaged` if the file is missing, truncated or garbage, or would run code.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch raises many kinds of errors for a bad file, most of them a page long
        raise CheckpointDamaged(f"{path} cannot be read ({_reason(error)})") from None


def read_rank(folder: str, role: str, rank: int) -> dict[str, Any]:
    """The state that rank `rank` of a role wrote. Raises `CheckpointDamaged` if the file does not exist."""
    path = Path(folder, f"rank-{rank}.pt")
    if not path.is_file():
        raise CheckpointDamaged(f"{folder} holds no state of rank {rank} of {role}")
    state: dict[str, Any] = read(path)
    return state


def _reason(error: Exception) -> str:
    """The reason why a file cannot be read, in one phrase."""
    # Without a filename the error is about an offset past the end of the file.
    if isinstance(error, OSError) and error.filename:
        return error.strerror or str(error)
    for prefix in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        if prefix in str(error):
            return f"it names {str(error).partition(prefix)[2].split()[0]}, which would be code to run"
    return "it is cut short or garbage"


def random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    generator: Any = np.random.get_state()
    name, keys, *position = generator
    numpy = (name, torch.from_numpy(keys.astype(np.int64)), *position)  # a tensor is read without running code
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    name, keys, *position = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
