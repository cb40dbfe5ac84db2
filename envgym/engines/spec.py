"""The specification of an engine, independent of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    transfer: str = "files"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
