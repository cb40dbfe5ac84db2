"""Weights in safetensors files: a model's own, and the buckets in which they go from a trainer to engines, with
checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.disk import replacement_file
from envgym.errors import WorkerError, report_full_disk

if TYPE_CHECKING:
    import torch


def write_weights(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors, any device and dtype, to `path`. A reader never sees a half-written file.

    Tensors may share memory (tied embeddings): each is written in full under its own name.
    """
    from safetensors.torch import save_file

    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous().cpu()
        # safetensors rejects shared memory
        separate[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    with report_full_disk(), replacement_file(Path(path)) as temporary:
        save_file(separate, temporary, metadata={"format": "pt"})


def save_model(model: Any, folder: str | Path, **options: Any) -> None:
    """Call `save_pretrained` of a model, and give the files of its weights, which safetensors makes readable for their
    owner alone, the mode of the config beside them. Raises `RunError` if the disk is full."""
    with report_full_disk():
        model.save_pretrained(folder, **options)
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(Path(folder, "config.json").stat().st_mode)


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """A checksum of all tensors' bytes, names, shapes and dtypes; as fast as memory can be read.

    It is the sum of the tensors' own, so that those of a model's parts add up to the model's, in any order and on any
    device."""
    return sum(
        zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum_of_words(tensor)}".encode())
        for name, tensor in tensors.items()
    )


def _sum_of_words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's 64-bit words modulo 2**64, xor the CRC of the remaining bytes."""
    import numpy as np
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    n_aligned = len(content) // 8 * 8
    words, tail = content[:n_aligned], content[n_aligned:].cpu().numpy().tobytes()
    if tensor.is_cuda:  # on the device, which reads its memory faster than it sends it
        aligned = words if words.data_ptr() % 8 == 0 else words.clone()
        total = int(aligned.view(torch.int64).sum()) % 2**64
    else:
        total = int(np.add.reduce(words.numpy().view(np.uint64), dtype=np.uint64))
    return total ^ zlib.crc32(tail)


# ---------------------------------------------------------------------------------------------------------
# Buckets: the files in which weights go from a trainer to engines


@dataclass(frozen=True, slots=True)
class Bucket:
    """A part of a model's weights, in a file that exists until the engines have read it."""

    number: int
    path: str
    n_bytes: int
    checksum: int


def split_into_buckets(tensors: Iterable[tuple[str, torch.Tensor]], n_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in buckets of at most `n_bytes`; a larger tensor is a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > n_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_bucket(number: int, path: str, tensors: Mapping[str, torch.Tensor]) -> Bucket:
    """Write a bucket to `path`."""
    tensors = _on_host(tensors)
    write_weights(path, tensors)
    return Bucket(number, path, sum(tensor.nbytes for tensor in tensors.values()), checksum(tensors))


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in host memory; those of a GPU as copies in pinned memory, to which it writes at full speed. torch
    reuses that memory from bucket to bucket."""
    import torch

    copies = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name] = pinned.copy_(tensor.detach(), non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def read_bucket(bucket: Bucket) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, mapped into memory: its file may be deleted while they are used. Raises `WorkerError` if
    their checksum differs from the one at writing."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(bucket.path)
    if checksum(tensors) != bucket.checksum:
        raise WorkerError(f"bucket {bucket.number} of the weights has changed on its way (checksums differ)")
    return tensors


class IncomingWeights:
    """The buckets that an engine receives in one update: each must come once and in order."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.checksum = 0
        """The checksum of all tensors so far."""
        self._n_buckets = 0

    def expect(self, bucket: Bucket) -> None:
        """Raise `WorkerError` unless `bucket` is the next one."""
        if bucket.number != self._n_buckets:
            raise WorkerError(f"bucket {bucket.number} of the weights came in place of bucket {self._n_buckets}")
        self._n_buckets += 1
        self.checksum += bucket.checksum

    def take(self, bucket: Bucket | Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of the next bucket, after checking its number and checksum."""
        assert isinstance(bucket, Bucket)
        self.expect(bucket)
        tensors = read_bucket(bucket)
        self.names.update(tensors)
        return tensors

    def check(self, n_buckets: int) -> None:
        """Raise `WorkerError` where buckets are missing."""
        if self._n_buckets != n_buckets:
            raise WorkerError(f"{self._n_buckets} of {n_buckets} buckets of the weights came")
