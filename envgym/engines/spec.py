"""The specification of an engine, whichever class implements it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model that an engine samples, and how it is to run.

    model          folder of a model
    dtype          `auto` (float32 on a CPU, bfloat16 elsewhere: what the workers take) or a torch dtype's name
    max_model_len  context length in tokens, prompt and answer together; None takes the model's
    deterministic  the same requests in the same order give the same bits
    concurrency    requests that will be in flight at once, so that as many may be sampled in one step (up to a limit
                   of the engine's, beyond which a step only gets longer); None takes the engine's own number
    lora_rank      the largest rank of adapters that will be loaded; 0: none will be
    sleeps         it will be told to sleep
    gpu_share      the share of a device's memory that it takes, for weights and cache
    engine_args    arguments of the library's own: of vLLM's `EngineArgs`, of transformers' `from_pretrained`
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    deterministic: bool = False
    concurrency: int | None = None
    lora_rank: int = 0
    sleeps: bool = False
    gpu_share: float = 0.5
    engine_args: Mapping[str, Any] = field(default_factory=dict)
