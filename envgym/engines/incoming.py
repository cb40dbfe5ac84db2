"""The weights that a trainer sends to an engine in files, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envgym.engine import Bucket
from envgym.errors import WorkerError
from envgym.models.weights_file import checksum

if TYPE_CHECKING:
    import torch


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
