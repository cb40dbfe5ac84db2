"""Export of a worker's weights: full parameters, gathered from the ranks that hold parts, in files, or between GPUs by
vLLM's own transfers (NCCL, and CUDA IPC on a shared GPU).

Written for vLLM 0.32. The controller calls the engines, so the trainer's side makes no calls to them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from envgym.engine import Bucket
from envgym.models.vision import vision_pattern
from envgym.models.weights_file import checksum, write_weights

from . import zero

if TYPE_CHECKING:
    from .adapter import Adapter
    from .optimizer import MovingAverage


def full_tensor(parameter: nn.Parameter, *, discarded: bool = False) -> torch.Tensor:
    """The full tensor of a parameter, gathered where ranks hold parts (then a collective call, and the tensor is on the
    host). A 4-bit parameter is returned in the number format that it is computed with. `discarded`: this rank only
    takes part, and gets a tensor on the meta device."""
    with zero.gathered_parameter(parameter):
        numbers: torch.Tensor = zero.gather_parts(parameter, parameter.detach())
        if discarded:
            return numbers.to("meta")
        if hasattr(parameter, "ds_id") or numbers.data_ptr() != parameter.data_ptr():
            return numbers.cpu().clone()
    if (state := getattr(parameter, "quant_state", None)) is None:
        return numbers
    import bitsandbytes

    numbers = bitsandbytes.functional.dequantize_4bit(parameter.detach(), state)
    return numbers


def full_parameters(
    model: nn.Module, adapter: Adapter | None, rank: int, *, merged: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The full parameters of a model (from Hugging Face), one at a time. Ranks other than 0 take part in gathering and
    get tensors on the meta device. A tied head is not repeated. `merged`: an adapter is added, in this format."""
    if adapter is not None:
        parameters = adapter.parameters(lambda _, p: full_tensor(p), merged=merged)
        yield from ((name, numbers if rank == 0 else numbers.to("meta")) for name, numbers in parameters)
        return
    for name, parameter in model.named_parameters():
        yield name, full_tensor(parameter, discarded=rank > 0)


def averaged_parameters(
    model: nn.Module, adapter: Adapter | None, average: MovingAverage, device: torch.device, merged: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The full parameters, or their moving averages where they have one, in the model's number format; with an adapter
    merged into them, in `merged`."""

    def read(name: str, parameter: nn.Parameter) -> torch.Tensor:
        return average.full_tensor(name, device).to(parameter.dtype) if name in average else full_tensor(parameter)

    if adapter is not None:
        return adapter.parameters(read, merged=merged)
    return ((name, read(name, parameter)) for name, parameter in model.named_parameters())


def as_in_checkpoints(
    model: nn.Module, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a model (from Hugging Face) under the names and in the pieces of its checkpoints: transformers
    stores a layer's experts in one tensor, and renames modules on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, numbers in parameters:
        yield from revert_weight_conversion(model, {name: numbers}).items()


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """(a, b): training `model` (from Hugging Face) on one token of a sequence of T takes a + b T FLOPs.

    A training step computes 6 N per token: 2 for each of N weights forward (a multiplication and an addition), twice
    that backward. J. Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1. Attention adds
    12 x heads x width of a head for every layer and every token of the sequence: A. Chowdhery et al., "PaLM" (2022),
    appendix B, which counts the whole sequence although a causal kernel may skip half of it. Recomputation to save
    memory does not count.

    N counts the weights of matrix products: not the embedding, which is only looked up (but a head tied to it), and of
    the experts only as many as a token is routed to. A frozen weight needs 4 instead of 6 FLOPs, since no gradient of
    it is computed. Layers with windowed attention are omitted from b, so that long sequences are never overcounted. A
    vision tower does not count: its work depends on the images, not on the tokens.
    """
    config = model.config.get_text_config()
    experts = n_experts(config)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    a, unreached = 0.0, vision_pattern(model)
    for name, parameter in model.named_parameters():
        if (parameter is embedding.weight and not is_tied) or re.fullmatch(unreached, name):
            continue
        fraction = share if ".experts." in name else 1.0
        a += fraction * (6 if parameter.requires_grad else 4) * zero.n_numbers(parameter)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return a, 12.0 * config.num_attention_heads * width * kinds.count("full_attention")


def n_experts(config: Any) -> int:
    """Number of experts per layer in a Hugging Face config; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


class WeightExport:
    """Export of a `ModelWorker`'s weights. All calls but `offer` and `withdraw` are collective."""

    rank: int
    network: Any
    adapter: Adapter | None
    _buckets: Iterator[Any] = iter(())
    _prefix = ""
    _files: list[str]
    _sender: Any = None
    _sent: ParameterSource | None = None

    def begin_export(self, bucket_bytes: int, prefix: str, checkpoint_names: bool = False) -> None:
        """Begin to export all parameters, under their names in the transformers model or, with `checkpoint_names`, in
        its checkpoints.

        Files are named `prefix`-NUMBER.safetensors, written on rank 0. `next_bucket` gathers and writes one, and keeps
        the last two; `end_export` removes the rest. A tied head is omitted, as in checkpoints, and so is an adapter,
        which has a separate file.
        """
        parameters = self._parameters()
        self._buckets = enumerate(
            split_into_buckets(
                as_in_checkpoints(self.network.model, parameters) if checkpoint_names else parameters, bucket_bytes
            )
        )
        self._prefix, self._files = prefix, []

    def next_bucket(self) -> Bucket | None:
        """Gather the next bucket and write it on rank 0; None after the last, and on other ranks. Engines must have
        read all buckets but the previous one: older files are removed."""
        number, tensors = next(self._buckets, (0, None))
        if tensors is None or self.rank:
            return None
        if len(self._files) == 2:
            Path(self._files.pop(0)).unlink(missing_ok=True)
        self._files.append(f"{self._prefix}-{number}.safetensors")
        return write_bucket(number, self._files[-1], tensors)

    def end_export(self) -> None:
        """Remove the remaining files."""
        for path in self._files:
            Path(path).unlink(missing_ok=True)

    def offer(self, path: str, n_bytes: int) -> bool:
        """Make an empty file at `path`, which engines look for; False if its folder has less than `n_bytes` free."""
        try:
            if shutil.disk_usage(Path(path).parent).free < n_bytes:
                return False
            Path(path).touch()
        except OSError:
            return False
        return True

    def withdraw(self, path: str) -> None:
        """Remove a file or folder that this rank has made for engines."""
        if Path(path).is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)

    def open_nccl(self, address: str, world_size: int) -> dict[str, Any]:
        """Connect to the engines' workers at `host:port`, on rank 0; returns the description of every transfer."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        host, _, port = address.rpartition(":")
        info = NCCLTrainerInitInfo(host, int(port), world_size, rank=self.rank)
        source = self._sent = ParameterSource(self.network.model)
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=NoOpClient(), source=source)
        metadata = source.metadata()
        return {
            "names": [meta.name for meta in metadata],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metadata],
            "shapes": [list(meta.shape) for meta in metadata],
        }

    def send_nccl(self) -> None:
        """Send all parameters to the engines, which must receive at the same time."""
        self._sender.send_weights()

    def begin_ipc(self, bucket_bytes: int) -> None:
        """Begin to share all parameters with engines on this rank's GPU; `next_ipc` returns their addresses."""
        self._sent = ParameterSource(self.network.model)
        self._buckets = _ipc_chunks(self._sent, bucket_bytes)

    def next_ipc(self) -> dict[str, Any] | None:
        """The next chunk, with handles by GPU; None after the last. Engines must have read the previous chunk."""
        return next(self._buckets, None)

    def sent_checksum(self) -> int:
        """The checksum of the parameters of the last transfer between GPUs."""
        assert self._sent is not None
        return self._sent.checksum

    def _parameters(self, merged: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return full_parameters(self.network.model, self.adapter, self.rank, merged=merged)


class ParameterSource:
    """A model's parameters as vLLM's `WeightSource`: the full tensors of checkpoints, on this rank's device, one at a
    time. Iteration is collective."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.checksum = 0
        """The checksum of the tensors of the last iteration."""

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._meta_tensors()]

    def max_bytes(self) -> int:
        """Bytes of the largest parameter."""
        return int(max(tensor.nbytes for _, tensor in self._meta_tensors()))

    def _meta_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without data, in the names, shapes and order of iteration."""
        parameters = self._model.named_parameters()
        return as_in_checkpoints(
            self._model,
            (
                (name, torch.empty(getattr(p, "ds_shape", p.shape), dtype=p.dtype, device="meta"))
                for name, p in parameters
            ),
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksum = 0
        for name, parameter in self._model.named_parameters():
            with zero.gathered_parameter(parameter):
                for item in as_in_checkpoints(self._model, [(name, parameter.detach())]):
                    self.checksum += checksum(dict([item]))
                    yield item


class NoOpClient:
    """A client for vLLM's trainer side that does nothing, because the controller calls the engines."""

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


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
    copies = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name] = pinned.copy_(tensor.detach(), non_blocking=True)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies


def _ipc_chunks(parameters: ParameterSource, bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """The weights, chunk by chunk, in a buffer on this rank's GPU that other processes can read. A chunk must be read
    before the next is requested."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    n_bytes = max(bucket_bytes, parameters.max_bytes())  # vLLM rejects a larger tensor
    for chunk in packed_ipc_producer(iter(parameters), uuid, lambda item: item[1], n_bytes):
        torch.cuda.synchronize()
        yield {
            "names": chunk.names,
            "shapes": chunk.shapes,
            "dtype_names": chunk.dtype_names,
            "tensor_sizes": chunk.tensor_sizes,
            "ipc_handles": chunk.ipc_handle,
        }
