"""Weights on their way from the trainer to the engine: a safetensors file in shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def where(n_bytes: int) -> Path:
    """The folder for a file of `n_bytes` that lives for one weight sync: memory where it has room (a container's
    often has 64 MiB), else a temporary folder."""
    memory = Path("/dev/shm")
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > n_bytes
    return memory if fits else Path(tempfile.gettempdir())


def write(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors, any device and dtype, to `path`. A reader never sees a half-written file.

    Tensors may share memory (tied embeddings): each is written in full under its own name.
    """
    from safetensors.torch import save_file

    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous().cpu()
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor  # safetensors refuses shared memory
        seen.add(tensor.data_ptr())
    try:
        save_file(separate, unfinished, metadata={"format": "pt"})
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) one at a time, so that a large model never needs twice its memory."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            yield name, file.get_tensor(name)
