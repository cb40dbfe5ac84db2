"""The specification that each rank of a model is started with, and the facts that a rank reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import WorkersConfig
from .lora import LoraConfig

if TYPE_CHECKING:
    from envgym.learner import RoleSpec
    from envgym.types import Row

    from .micro_batches import Layout


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A model that a role of the learner needs, the same for all of its ranks.

    role       its name
    model      folder or hub id
    role_spec  whether it is trained, and its outputs
    learner    name and settings of the learner, for a trained role
    """

    role: str
    model: str
    role_spec: RoleSpec
    learner: Mapping[str, Any] | None = None
    settings: WorkersConfig = field(default_factory=WorkersConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    seed: int = 0
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Facts of a rank that has loaded its model.

    n_parameters     of the model, over all ranks
    n_trained        number of trained ones
    adapter          whether an adapter is trained instead of the weights
    vocabulary       number of token ids
    attention        its implementation, by transformers' name
    packed           whether rows go through the model end to end
    not_shared       the reason why prefixes that rows share are not computed once; empty if they are
    notes            what the model does without, each with the reason
    flops_per_token  (a, b): training on one token of a sequence of T tokens takes a + b T FLOPs
    peak_flops       FLOPs per second of the device; None if unknown (on a CPU)
    """

    n_parameters: int
    n_trained: int
    adapter: bool
    device: str
    dtype: str
    vocabulary: int
    attention: str
    packed: bool
    not_shared: str
    notes: tuple[str, ...]
    flops_per_token: tuple[float, float]
    peak_flops: float | None

    def layout_of(self, samples: Sequence[Row]) -> Layout:
        """The layout of these samples in the model; see `choose_layout`."""
        from .micro_batches import choose_layout

        return choose_layout(samples, shares_prefixes=not self.not_shared, packed=self.packed)

    def flops(self, samples: Sequence[Row]) -> float:
        """FLOPs of training on `samples` once."""
        a, b = self.flops_per_token
        return sum(a * length + b * length**2 for length in (len(sample.token_ids) for sample in samples))
