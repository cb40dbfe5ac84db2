"""What policy-gradient learners share: the clipped loss, how it is averaged, and episodes laid out as rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from envgym.learner import Learner, LearnerConfig, LearnRow, Metrics, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Group

from .kl import Estimator, kl_estimate

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token", "sequence", "constant"]


class PolicyGradientConfig(LearnerConfig):
    """Settings of the clipped policy loss."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio to the sampling policy is clipped at 1 - clip_low from below."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 + clip_high from above."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss. 0 builds no reference model."""
    kl_estimator: Estimator = "k3"
    """How that KL is estimated from the sampled tokens."""
    aggregation: Aggregation = "sequence"
    """`token`: mean over all tokens of the step; `sequence`: mean over episodes of each one's token mean;
    `constant`: sum over tokens divided by episodes times `constant_length`."""
    constant_length: int = Field(1024, ge=1)
    """The length that `constant` aggregation divides by."""


class PolicyGradient(Learner):
    """Base of the learners that weigh sampled tokens by an advantage. A subclass says what the advantage is."""

    Config: ClassVar[type[LearnerConfig]] = PolicyGradientConfig
    config: PolicyGradientConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        actor = {"actor": RoleSpec(trained=True, scored=False)}
        return actor | ({"reference": RoleSpec()} if self.config.kl_coef > 0 else {})

    @abstractmethod
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        """One advantage for each episode of a group, from their rewards."""

    def prepare(self, groups: Sequence[Group]) -> list[LearnRow]:
        rows: list[LearnRow] = []
        n_episodes = 0
        for unit, group in enumerate(groups):
            episodes = [episode for episode in group.episodes if episode.reward is not None]
            for episode, advantage in zip(episodes, self.advantages([e.reward or 0.0 for e in episodes]), strict=True):
                rows += self._rows(episode, advantage, n_episodes, unit)
                n_episodes += 1
        return rows

    def _rows(self, episode: Episode, advantage: float, index: int, unit: int) -> list[LearnRow]:
        import numpy as np

        rows = [LearnRow.of(row, episode=index, unit=unit) for row in episode.rows]
        total = sum(float(row.weights.sum()) for row in rows)
        for row in rows:
            row.arrays["advantages"] = np.full(len(row.token_ids), advantage, np.float32)
            if self.config.aggregation == "sequence" and total > 0:
                row.weights = row.weights / np.float32(total)  # one episode counts once, however many rows it has
        return rows

    def denominators(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        if self.config.aggregation == "token":
            return super().denominators(rows)
        n_episodes = max(1, len({row.episode for row in rows}))
        scale = self.config.constant_length if self.config.aggregation == "constant" else 1
        return {row.objective: float(n_episodes * scale) for row in rows}

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        import torch

        counts = batch.weights > 0

        def counted(values: torch.Tensor) -> torch.Tensor:
            # `where`, not a product with the mask: a NaN or infinity where nothing was sampled must reach neither the
            # loss nor, through a derivative there, the gradient.
            return torch.where(counts, values, 0.0)

        logprobs, old = counted(outputs.logprobs), counted(batch.old_logprobs)
        advantages = counted(batch.arrays["advantages"])
        losses, clipped = clipped_policy_loss(logprobs, old, advantages, self.config.clip_low, self.config.clip_high)
        n_tokens = float(counts.sum())
        metrics: Metrics = {
            "policy/clip_fraction": (float(clipped.sum()), n_tokens),
            "policy/entropy": (float(counted(outputs.entropy).detach().sum()), n_tokens),
        }
        if self.config.kl_coef > 0:
            kl = kl_estimate(logprobs, counted(batch.arrays["reference"]), self.config.kl_estimator)
            losses = losses + self.config.kl_coef * kl
            metrics["policy/kl"] = (float(kl.detach().sum()), n_tokens)
        total = (batch.weights * losses).sum()
        metrics["loss"] = (float(total.detach()), float(batch.weights.sum()))
        return total / denominators[batch.objective], metrics


def clipped_policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate, negated, per token, and where the clip was active. All arguments the same shape.

    Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; separate bounds as in
    DAPO (Q. Yu et al., 2025). The log-ratio is bounded at 20 so that its exponential stays finite.
    """
    import torch

    ratio = (logprobs - old).clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, bounded), bounded > unclipped
