"""Weights in files of safetensors' form: whole, or in buckets on their way from a trainer to engines."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.errors import WorkerError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some of a model's weights, in a file that lives until the engines have read it."""

    number: int
    path: str
    n_bytes: int
    checksum: int


def write_weights(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
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


def read_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a safetensors file, mapped into memory: the file may be deleted while they are used."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no mapping
            yield name, file.get_tensor(name)


def cut(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in buckets of at most so many bytes, or of one tensor that is larger."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_bucket(number: int, path: str, tensors: Mapping[str, torch.Tensor]) -> Bucket:
    """Write a bucket to `path`."""
    write_weights(path, tensors)
    return Bucket(number, path, sum(tensor.nbytes for tensor in tensors.values()), checksum(tensors))


def read_bucket(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The tensors of a bucket. Raises `WorkerError` where they are not those that were written."""
    tensors = dict(read_weights(bucket.path))
    if checksum(tensors) != bucket.checksum:
        raise WorkerError(f"bucket {bucket.number} of the weights has changed on its way (checksums differ)")
    return tensors


class Update:
    """An engine's weights on their way in: every bucket comes, once and in order."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._n_buckets = 0

    def expect(self, bucket: Bucket) -> None:
        """Raise `WorkerError` for a bucket that is not the next."""
        if bucket.number != self._n_buckets:
            raise WorkerError(f"bucket {bucket.number} of the weights came in place of bucket {self._n_buckets}")
        self._n_buckets += 1

    def take(self, bucket: Bucket | Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of the next bucket, checked."""
        assert isinstance(bucket, Bucket)
        self.expect(bucket)
        tensors = read_bucket(bucket)
        self.names.update(tensors)
        return tensors

    def check(self, n_buckets: int) -> None:
        """Raise `WorkerError` where buckets are missing."""
        if self._n_buckets != n_buckets:
            raise WorkerError(f"{self._n_buckets} of {n_buckets} buckets of the weights came")


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """A number that changes with any byte of any tensor, with its name, shape and dtype; at the speed of memory."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum_of_words(tensor)}".encode(), total)
    return total


def _sum_of_words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's 64-bit words, without carry, and of the bytes that are left."""
    import numpy as np
    import torch

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(content) // 8 * 8
    words = int(np.add.reduce(content[:whole].view(np.uint64), dtype=np.uint64))
    return words ^ zlib.crc32(content[whole:].tobytes())
