"""Weights on their way out of a worker: in files, or between GPUs by vLLM's own transfers (NCCL, and CUDA IPC on a GPU
that both share).

Written for vLLM 0.32. The controller tells the engines what to expect, so the trainer's side has nobody to call.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from envgym.models.weights_file import Bucket, cut, write_bucket

from . import zero
from .parameters import as_in_checkpoints, whole_parameters

if TYPE_CHECKING:
    from .adapter import Adapter


class WeightExport:
    """Export of a `ModelWorker`'s weights. Ranks must be called together, but for `offer`."""

    rank: int
    network: Any
    adapter: Adapter | None
    _buckets: Iterator[Any] = iter(())
    _prefix = ""
    _files: list[str]
    _sender: Any = None

    def begin_export(self, bucket_bytes: int, prefix: str, checkpoint: bool = False) -> None:
        """Begin to hand out all parameters, in files whose names begin with `prefix`; `next_bucket` gives them, and
        `end_export` ends it. Their names are those of the model in transformers or, with `checkpoint`, of its
        checkpoints.

        A head that is tied to the embeddings is left out, as checkpoints leave it out; and so is an adapter, which is a
        file of its own.
        """
        named = self._parameters(merged=False)
        self._buckets = enumerate(
            cut(as_in_checkpoints(self.network.model, named) if checkpoint else named, bucket_bytes)
        )
        self._prefix, self._files = prefix, []

    def next_bucket(self) -> Bucket | None:
        """Write the next bucket (rank 0 does); None after the last. By now all but the one before have been read."""
        number, tensors = next(self._buckets, (0, None))
        if tensors is None or self.rank:
            return None
        if len(self._files) == 2:
            Path(self._files.pop(0)).unlink(missing_ok=True)
        self._files.append(f"{self._prefix}-{number}.safetensors")
        return write_bucket(number, self._files[-1], tensors)

    def end_export(self) -> None:
        """Remove the files that are left."""
        for path in self._files:
            Path(path).unlink(missing_ok=True)

    def offer(self, path: str, n_bytes: int) -> bool:
        """Make an empty file at `path`, for others to look for, where its folder has room for `n_bytes`."""
        try:
            if shutil.disk_usage(Path(path).parent).free < n_bytes:
                return False
            Path(path).touch()
        except OSError:
            return False
        return True

    def withdraw(self, path: str) -> None:
        """Remove a file, or a folder, that this rank has made for others."""
        if Path(path).is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    def open_nccl(self, address: str, world_size: int) -> dict[str, Any]:
        """Meet the engines' workers at `host:port` (rank 0 does); returns what they are to receive each time."""
        self._sender = _open_nccl(self.network.model, address, world_size, self.rank)
        return Parameters(self.network.model).described()

    def send_nccl(self) -> None:
        """Send all parameters to the engines, who receive at the same time."""
        self._sender.send_weights()

    def begin_ipc(self, bucket_bytes: int) -> None:
        """Begin to show all parameters to engines on this rank's GPU; `next_ipc` says where they are."""
        self._buckets = _ipc_chunks(self.network.model, bucket_bytes)

    def next_ipc(self) -> dict[str, Any] | None:
        """The next chunk, by the name of this rank's GPU; None after the last. Those before have been read."""
        return next(self._buckets, None)

    def _parameters(self, *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        return whole_parameters(self.network.model, self.adapter, self.rank, merged=merged)


class Parameters:
    """A model's parameters as vLLM's `WeightSource`: as in checkpoints, whole, on this rank's device, one at a time.
    Ranks must go through them together."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, empty.dtype, tuple(empty.shape)) for name, empty in self._empty()]

    def largest(self) -> int:
        """Bytes of the largest of them."""
        return int(max(empty.nbytes for _, empty in self._empty()))

    def _empty(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = self._model.named_parameters()
        return as_in_checkpoints(
            self._model,
            ((name, torch.empty(getattr(p, "ds_shape", p.shape), dtype=p.dtype, device="meta")) for name, p in named),
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            with zero.gathered(parameter):
                yield from as_in_checkpoints(self._model, [(name, parameter.detach())])

    def described(self) -> dict[str, Any]:
        """Names, dtypes and shapes that vLLM's NCCL engine receives."""
        found = self.metadata()
        return {
            "names": [one.name for one in found],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in found],
            "shapes": [list(one.shape) for one in found],
        }


class Silent:
    """vLLM's client of engines, where the controller makes its calls."""

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _open_nccl(model: torch.nn.Module, address: str, world_size: int, rank: int) -> Any:
    """A sender to the engines' `world_size` - 1 workers, who must join at `host:port` at the same time."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    host, _, port = address.rpartition(":")
    info = NCCLTrainerInitInfo(host, int(port), world_size, rank=rank)
    return NCCLTrainerWeightTransferEngine.trainer_init(info, client=Silent(), source=Parameters(model))


def _ipc_chunks(model: torch.nn.Module, bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """The weights in a buffer of this rank's GPU that other processes on it may read: chunk by chunk, each to be read
    before the next is asked for."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    parameters = Parameters(model)
    n_bytes = max(bucket_bytes, parameters.largest())  # a tensor that is larger would be refused
    for chunk in packed_ipc_producer(iter(parameters), uuid, lambda named: named[1], n_bytes):
        torch.cuda.synchronize()
        yield {
            "names": chunk.names,
            "shapes": chunk.shapes,
            "dtype_names": chunk.dtype_names,
            "tensor_sizes": chunk.tensor_sizes,
            "ipc_handles": chunk.ipc_handle,
        }
