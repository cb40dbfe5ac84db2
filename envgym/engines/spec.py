"""The specification of an engine, independent of its class; a model's folder, as every engine reads it; and the weights
that a trainer sends in files, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.engine import Bucket
from envgym.errors import ConfigError, WorkerError
from envgym.models.weights_file import checksum

if TYPE_CHECKING:
    import torch


LONGEST_DEFAULT = 32768
"""Maximum context length in tokens by default: the cache of a longer one takes tens of gigabytes."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model that an engine samples from, and the engine's options.

    model          folder of a model
    dtype          `auto` (float32 on a CPU, bfloat16 elsewhere, as in the workers) or a torch dtype's name
    max_model_len  context length in tokens, prompt and completion together; None takes the model's, at most 32768
    deterministic  the same requests in the same order give the same bits
    concurrency    maximum number of requests in flight, so that as many can be sampled in one step (up to the engine's
                   limit, beyond which a step only gets longer); None takes the engine's own number
    lora_rank      maximum rank of the adapters to load; 0: no adapters
    sleeps         True if `sleep` will be called
    in_flight      True if weights are loaded while requests are in flight
    gpu_share      the share of a device's memory to use, for weights and cache
    cache_bytes    the size of a GPU's cache for keys and values; None takes what `gpu_share` leaves
    tensor_parallel  devices over which every layer is split
    image_size     the argument `size` of the model's processor of images; None takes its own
    transfer       way of new weights: `files`, or vLLM's own `nccl` and `cuda_ipc`
    engine_args    arguments of the library: of vLLM's `EngineArgs`, of transformers' `from_pretrained`
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    deterministic: bool = False
    concurrency: int | None = None
    lora_rank: int = 0
    sleeps: bool = False
    in_flight: bool = True
    gpu_share: float = 0.5
    cache_bytes: int | None = None
    tensor_parallel: int = 1
    image_size: Mapping[str, int] | None = None
    transfer: str = "files"
    engine_args: Mapping[str, Any] = field(default_factory=dict)


def check_model_folder(model: str) -> None:
    """Raise `ConfigError` for a path without a causal language model. Hub ids are not checked."""
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise ConfigError(f"there is no model folder {model!r}")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{model!r} is not a model folder: it has no config.json")
    try:
        architectures = json.loads(config.read_bytes()).get("architectures") or []
    except (ValueError, AttributeError):
        raise ConfigError(f"{str(config)!r} is not a JSON object") from None
    if architectures and not any(name.endswith(("LM", "LMHeadModel", "Generation")) for name in architectures):
        raise ConfigError(f"{model!r} holds a {architectures[0]}, which is not a causal language model")


def end_tokens(config: Any, model: str) -> tuple[int, ...]:
    """The ids that end a turn, sorted: the end-of-sequence tokens of the model's config and generation config. Of a
    vision-language model without one there, that of its language model's config."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # many models have none
        generation = None

    def read(source: Any) -> set[int]:
        value = getattr(source, "eos_token_id", None)
        return {value} if isinstance(value, int) else set(value or ())

    return tuple(sorted(read(config) | read(generation) or read(config.get_text_config())))


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
