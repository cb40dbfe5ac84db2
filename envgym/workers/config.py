"""Settings of the workers that hold trained and scoring models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class WorkersConfig(BaseModel):
    """How a model is spread over processes and memory. None of it changes what is learned, but for rounding."""

    model_config = ConfigDict(extra="forbid")

    ranks: int = Field(1, ge=1)
    """Processes (one per GPU, where there are any) that share the work of one model."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO: what is split over the ranks instead of copied. 1: optimizer state; 2: and gradients;
    3: and parameters. Higher saves memory and costs communication. In bfloat16, 0 runs as 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights. `auto` is bfloat16 (with float32 master weights) on a GPU, float32 on a CPU."""
    tokens_per_microbatch: int = Field(4096, ge=1)
    """Padded tokens that go through the model at once. Smaller saves memory; the gradient is the same."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory for about a third more computing."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Raw DeepSpeed JSON, merged over what envgym writes (`{"zero_optimization": {"offload_optimizer": …}}`)."""
