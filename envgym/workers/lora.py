"""Settings of LoRA: small matrices trained beside a model's frozen ones.

Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021); with a 4-bit base, T. Dettmers et
al., "QLoRA" (2023).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from envgym.errors import ConfigError, missing_package
from envgym.settings import Settings

if TYPE_CHECKING:
    from .config import WorkersConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter folder in peft's format."""
ORIGIN = "envgym.json"
"""envgym's file in the folder of an adapter trained on 4-bit weights: their quantization and compute dtype."""


class LoraConfig(Settings):
    """Train an adapter instead of the weights: W x becomes W x + (alpha / rank) B A x, and only A and B are trained.

    The names are peft's.
    """

    rank: int = Field(0, ge=0, le=512)
    """Rows of A and columns of B. 0: no adapter, all weights are trained."""
    alpha: float = Field(16.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of an adapter's inputs dropped in training. Not supported in reinforcement learning, where the trained
    policy must be the one that sampled."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Suffixes of the names of the layers that get an adapter (`[q_proj, v_proj]`); by default every linear layer but
    the head. A vision tower gets none."""
    quantize: Literal["none", "4bit"] = "none"
    """`4bit` is QLoRA: the frozen weights are stored in 4 bits (NormalFloat, double quantisation), and computed with in
    `workers.dtype`."""

    def check(self, role: str, workers: WorkersConfig, *, is_sampled: bool) -> None:
        """Raise `ConfigError` for contradictory settings. `is_sampled`: the role is the policy that generates
        episodes."""
        if not self.rank:
            unused = next((name for name, value in LoraConfig() if getattr(self, name) != value), None)
            if unused:
                raise ConfigError(f"lora.{unused} of the {role} has no effect without an adapter: set lora.rank")
            return
        if self.dropout and is_sampled:
            raise ConfigError(
                f"lora.dropout={self.dropout:g} would train another policy than the one that is sampled: set it to 0"
            )
        if workers.tensor_parallel > 1:
            raise ConfigError(f"the adapter of the {role} needs whole layers: set workers.tensor_parallel=1")
        if self.quantize != "none" and workers.partitions(trained=True):
            raise ConfigError(f"lora.quantize={self.quantize} needs workers.zero_stage 0, 1 or 2, not 3")

    def check_installed(self) -> None:
        """Raise `MissingDependency` for a missing package that these settings need, without importing it."""
        if self.rank and find_spec("peft") is None:
            raise missing_package("peft", "lora", "lora.rank")
        if self.rank and self.quantize != "none" and find_spec("bitsandbytes") is None:
            raise missing_package("bitsandbytes", "qlora", f"lora.quantize={self.quantize}")
