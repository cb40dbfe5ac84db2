"""The state of an engine whose weights are being replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envgym.errors import WorkerError
from envgym.models.weights_file import Bucket, read_bucket

if TYPE_CHECKING:
    import torch


class Update:
    """Sees to it that every bucket comes, once and in order."""

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
