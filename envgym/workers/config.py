"""Settings of the workers that hold the trained and frozen models of a learner, and the specification that each rank is
started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from envgym.errors import ConfigError
from envgym.settings import Settings

from .lora import LoraConfig

if TYPE_CHECKING:
    from envgym.learner import LearnerConfig, RoleSpec

LEAST_TOKENS = 4096
"""Tokens per micro-batch unless a plan finds memory for more."""
MAX_LOGITS = 2**25
"""Maximum number of logits in memory on a CPU: 128 MiB in float32, and as much again for what is computed from them."""
GPU_SHARE = 128
"""On a GPU, logits and what is computed from them take its memory divided by this: 0.6 GiB of 80."""


def number_format(dtype: str, *, on_cpu: bool) -> str:
    """The number format of weights for a setting `dtype`: `auto` is float32 on a CPU, bfloat16 elsewhere."""
    return dtype if dtype != "auto" else "float32" if on_cpu else "bfloat16"


class WorkersConfig(Settings):
    """Distribution of a model over processes and memory. These settings change training only by rounding."""

    ranks: int = Field(1, ge=1)
    """Processes (one per GPU, where there are any) that share the work of one model."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO: what is split over the ranks instead of copied. 1: optimizer state; 2: and gradients;
    3: and parameters. Higher saves memory and costs communication. In bfloat16 0 and 1 run as 2, in float16 0 as 1."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer (DeepSpeed AutoTP): every large matrix is split, and they have the same sequences."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence, for sequences too long for one rank: each has a slice of it, and in attention a
    share of the heads (Ulysses)."""
    offload_optimizer: bool = False
    """Optimizer state and float32 master weights in the CPU's memory, where the optimizer then also computes.
    Needs `zero_stage` 1 to 3. (To a disk: see `deepspeed`.)"""
    offload_parameters: bool = False
    """Parameters in the CPU's memory, brought in layer by layer. Needs `zero_stage` 3, which a frozen
    model gets automatically: `roles.reference.workers.offload_parameters=true`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights. `auto` is bfloat16 (with float32 master weights) on a GPU, float32 on a CPU.
    float16 is trained with dynamic loss scaling: a step that overflows is skipped, and counted in `overflow`."""
    tokens_per_microbatch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens that a rank computes per micro-batch, padding included. Smaller saves memory; the gradient is the same.
    `auto`: 4,096, and on GPUs up to 16,384 if the plan has memory for them."""
    attention: str = "auto"
    """Implementation of attention, by transformers' names: `sdpa`, `eager`, `flash_attention_2`, `flash_attention_3`,
    `flex_attention`, or `torch_varlen`: torch's own for rows of different lengths. `auto` is a flash kernel where its
    package is installed and the model knows it; else `torch_varlen` on a GPU in 16 bits, for models that it covers;
    else `sdpa`."""
    packing: bool | Literal["auto"] = "auto"
    """Concatenate sequences instead of padding them to the longest. `auto`: with flash kernels and `torch_varlen`, for
    which that is faster, and models that mix tokens only by attention."""
    kernels: Literal["auto", "none"] = "auto"
    """Fused kernels on a GPU in place of the model's own layers. `auto`: envgym's for log-probabilities and entropies,
    and those of liger-kernel (`pip install 'envgym[gpu]'`) for normalisation, rotary positions and gated layers of the
    families that it knows, each if the outputs are the same, which is tried at the start. `none`: the model as
    transformers has it, and log-probabilities by torch."""
    share_prefixes: bool = True
    """Compute what several sequences begin with once: a group's prompt, the common turns of episodes, the prompt of a
    preference pair. Sequences are computed separately where this would change the outputs, which is tried at the start,
    and where less than a tenth is shared."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory for about a third more compute."""
    compile: bool = False
    """DeepCompile: the trained model is compiled together with its communication. Needs a GPU and `zero_stage` 1 to
    3."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Raw DeepSpeed JSON, merged over envgym's (`{"zero_optimization": {"offload_optimizer": …}}`)."""

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that have the same rows. Their numbers are consecutive; other ranks have other rows."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def budget(self) -> int:
        """Tokens per micro-batch of the ranks that split token sequences, each of which holds a slice."""
        return self.tokens_per_rank * self.sequence_parallel

    @property
    def tokens_per_rank(self) -> int:
        """Tokens per micro-batch of one rank."""
        return LEAST_TOKENS if self.tokens_per_microbatch == "auto" else self.tokens_per_microbatch

    def partitions(self, *, trained: bool) -> bool:
        """True if the parameters of a model are split over the ranks (ZeRO 3)."""
        return self.zero_stage == 3 or (self.offload_parameters and not trained)

    def effective_zero_stage(self, dtype: str, *, trained: bool) -> int:
        """The ZeRO stage of a model with weights of this number format.

        Gradients of micro-batches must be summed in float32: in bfloat16 the sum of 256 was measured 2% off. DeepSpeed
        does so from stage 1 on; its stage 0 also counts a skipped step of Adam. Its stage 1 for bfloat16 has an
        optimizer that can neither be offloaded from a GPU nor be compiled.
        """
        if self.partitions(trained=trained):
            return 3
        return max(self.zero_stage, {"bfloat16": 2, "float16": 1}.get(dtype, 0) if trained else 0)

    def check(self, role: str, learner: LearnerConfig | None) -> None:
        """Raise `ConfigError` for contradictory settings of a role's model. No learner: it is not trained."""
        if self.ranks % self.ranks_per_row:
            raise ConfigError(
                f"workers.tensor_parallel={self.tensor_parallel} times workers.sequence_parallel="
                f"{self.sequence_parallel} does not divide workers.ranks={self.ranks} of the {role}"
            )
        if "tensor_parallel" in self.deepspeed:
            raise ConfigError("workers.deepspeed.tensor_parallel: set workers.tensor_parallel instead")
        if "stage" in self.deepspeed.get("zero_optimization", {}):
            raise ConfigError("workers.deepspeed.zero_optimization.stage: set workers.zero_stage instead")
        if self.sequence_parallel > 1 and self.attention in ("eager", "flex_attention"):
            raise ConfigError(
                f"workers.sequence_parallel works with sdpa and flash kernels, not workers.attention={self.attention}"
            )
        if self.sequence_parallel > 1 and self.packing is True:
            raise ConfigError(
                "workers.packing=true does not work with workers.sequence_parallel above 1: set only one of them"
            )
        if self.ranks_per_row > 1 and self.compile:
            raise ConfigError("workers.compile cannot be combined with workers.tensor_parallel or sequence_parallel")
        if learner is None:
            return
        if self.tensor_parallel > 1 and learner.optimizer == "muon":
            raise ConfigError("learner.optimizer=muon needs whole matrices: set workers.tensor_parallel=1")
        if self.offload_parameters and self.zero_stage != 3:
            raise ConfigError(
                f"workers.offload_parameters of the {role}, which is trained, needs workers.zero_stage=3, "
                f"not {self.zero_stage}"
            )
        for name in ("offload_optimizer", "compile"):
            if getattr(self, name) and not self.zero_stage:
                raise ConfigError(f"workers.{name} needs workers.zero_stage 1, 2 or 3, not 0")
        if self.compile and learner.optimizer == "muon":
            raise ConfigError(
                "workers.compile and learner.optimizer=muon do not work together in DeepSpeed: set only one of them"
            )
        if "optimizer" in self.deepspeed and learner.optimizer != "adamw":
            raise ConfigError(
                f"learner.optimizer={learner.optimizer} and an optimizer in workers.deepspeed: set only one of them"
            )


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The images of a run's rows: the folder that has their files, and the size that the model's processor gives them
    (its own argument), by default its configured one."""

    folder: str
    size: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A model that a role of the learner needs, the same for all of its ranks.

    role       its name
    model      folder or hub id
    role_spec  whether it is trained, and its outputs
    learner    name and settings of the learner, for a trained role
    images     where rows may have images; None: they are text alone
    """

    role: str
    model: str
    role_spec: RoleSpec
    learner: Mapping[str, Any] | None = None
    settings: WorkersConfig = field(default_factory=WorkersConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    seed: int = 0
    deterministic: bool = False
    images: ImageConfig | None = None
