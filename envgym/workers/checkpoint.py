"""Files of a checkpoint: tensors and plain values. Reading one runs no code, whoever it comes from."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envgym.errors import CheckpointDamaged, RunError, cannot_write


def write(path: str | Path, state: Any) -> None:
    """Write `state`, so that `read` gives it back. Raises `RunError` in one line where the disk is full."""
    with writing(path):
        torch.save(state, path)


class Writer:
    """Writes files in a thread of its own, from copies, so that what they hold may change meanwhile."""

    def __init__(self) -> None:
        self.waits = False
        """Files are written at once, and nothing is copied."""
        self._thread = ThreadPoolExecutor(1)
        self._files: list[Future[None]] = []

    def write(self, path: str | Path, state: Any) -> None:
        """Begin to write `state` to `path`."""
        if self.waits:
            write(path, state)
        else:
            self._files.append(self._thread.submit(write, path, on_host(state, {})))

    async def finish(self) -> None:
        """Return once every file is written. Raises what went wrong with one."""
        files, self._files = self._files, []
        await asyncio.gather(*map(asyncio.wrap_future, files))


def on_host(value: Any, known: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    """A copy of nested values, with tensors in the host's memory; those that are one (a tied head) stay one."""
    if isinstance(value, torch.Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key]
    if isinstance(value, dict):
        copied = copy.copy(value)
        for name, one in value.items():
            copied[name] = on_host(one, known)
        return copied
    if isinstance(value, list):
        return [on_host(one, known) for one in value]
    if type(value) is tuple:
        return tuple(on_host(one, known) for one in value)
    return value


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """`torch.save` to `path` may go on within. Raises `RunError` in one line where the disk is full."""
    try:
        yield
    except OSError as error:
        if (reason := cannot_write(error)) is None:
            raise
        raise RunError(reason) from None
    except RuntimeError as error:
        if not any(known in str(error) for known in ("PytorchStreamWriter", "inline_container", "iostream error")):
            raise
        raise RunError(f"{path} cannot be written: is the disk full?") from None


def read(path: str | Path, map_location: Any = None, *, also: Sequence[type] = (), mapped: bool = False) -> Any:
    """The contents of a file; classes other than torch's own are known only where they are in `also`. `mapped`: tensors
    are read where they are used.

    Raises `CheckpointDamaged` in one line where it is missing, cut short or garbage, or would run code.
    """
    try:
        with torch.serialization.safe_globals(list(also)):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch tells of a bad file in a dozen ways, most of them a page long
        raise CheckpointDamaged(f"{path} cannot be read ({_reason(error)})") from None


def read_rank(folder: str, role: str, rank: int) -> dict[str, Any]:
    """State that rank `rank` of a role wrote. Raises `RunError` where it is not there."""
    path = Path(folder, f"rank-{rank}.pt")
    if not path.is_file():
        raise RunError(f"{folder} holds no state of rank {rank} of {role}")
    state: dict[str, Any] = read(path)
    return state


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:  # else it is about a place in the file that is not there
        return error.strerror or str(error)
    for known in ("Unsupported global: GLOBAL ", "Trying to load unsupported GLOBAL "):
        if known in str(error):
            return f"it names {str(error).partition(known)[2].split()[0]}, which would be code to run"
    return "it is cut short or garbage"


def random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    generator: Any = np.random.get_state()
    name, keys, *rest = generator
    numpy = (name, torch.from_numpy(keys.astype(np.int64)), *rest)  # as a tensor, which is read without running code
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
