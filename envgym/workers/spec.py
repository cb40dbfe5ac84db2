"""The specification of a model's ranks, which each of them is started with, and the facts that a rank reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envgym.learner import RoleSpec, TrainSample

from .config import WorkersConfig
from .lora import LoraConfig


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A model that a role of the learner needs, the same for all of its ranks.

    role       its name
    model      folder or hub id
    role_spec  whether it is trained, and what it answers
    learner    name and settings of the learner, which only a trained role needs
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

    n_parameters     of the whole model
    n_trained        how many of these learn
    adapter          whether an adapter learns in place of the weights
    vocabulary       number of its ids
    attention        its implementation, by transformers' name
    packed           whether rows go through the model end to end
    flops_per_token  (a, b): learning from a token of a sequence of T takes the model a + b T FLOPs
    peak_flops       FLOPs a second that the device can do; None where that is not known (on a CPU)
    """

    n_parameters: int
    n_trained: int
    adapter: bool
    device: str
    dtype: str
    vocabulary: int
    attention: str
    packed: bool
    flops_per_token: tuple[float, float]
    peak_flops: float | None

    def flops(self, samples: Sequence[TrainSample]) -> float:
        """FLOPs that learning from `samples` once takes the model."""
        a, b = self.flops_per_token
        return sum(a * length + b * length**2 for length in (len(sample) for sample in samples))
