"""The trainer's end of vLLM's own weight transfers between GPUs: NCCL, and CUDA IPC on a GPU that both share.

Written for vLLM 0.32. The controller tells the engines what to expect, so the trainer's side has nobody to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import zero


class Parameters:
    """A model's parameters as vLLM's `WeightSource`: whole, on this rank's device, one at a time. Ranks must go through
    them together."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        named = self._model.named_parameters(remove_duplicate=False)
        return [ParamMeta(name, p.dtype, tuple(getattr(p, "ds_shape", p.shape))) for name, p in named]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            with zero.gathered(parameter):
                yield name, parameter.detach()

    def described(self) -> dict[str, Any]:
        """What vLLM's NCCL engine is told to receive."""
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


def open_nccl(model: torch.nn.Module, address: str, world_size: int, rank: int) -> Any:
    """A sender to the engines' `world_size` - 1 workers, who must join at `host:port` at the same time."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    host, _, port = address.rpartition(":")
    info = NCCLTrainerInitInfo(host, int(port), world_size, rank=rank)
    return NCCLTrainerWeightTransferEngine.trainer_init(info, client=Silent(), source=Parameters(model))


def ipc_chunks(model: torch.nn.Module, bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """The weights in a buffer of this rank's GPU that other processes on it may read: chunk by chunk, each to be read
    before the next is asked for."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    for chunk in packed_ipc_producer(iter(Parameters(model)), uuid, lambda named: named[1], bucket_bytes):
        torch.cuda.synchronize()
        yield {
            "names": chunk.names,
            "shapes": chunk.shapes,
            "dtype_names": chunk.dtype_names,
            "tensor_sizes": chunk.tensor_sizes,
            "ipc_handles": chunk.ipc_handle,
        }
