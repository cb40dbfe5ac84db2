"""PPO: a critic estimates what each state is worth, and an advantage is how much better than that things went.

Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with generalised advantage estimation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from envgym.learner import LearnerConfig, Metrics, Outputs, RoleSpec, RowBatch, TrainSample
from envgym.types import Objective

from .advantages import ActionTokens, generalised_advantages
from .policy_gradient import PolicyGradient
from .settings import Credit, PolicyGradientConfig, RewardKL, Scope

if TYPE_CHECKING:
    import torch

    from .advantages import Steps


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """From 0, which trusts the critic for all but the next token, to 1, which trusts what was really earned."""
    value_clip: float | None = Field(0.5, gt=0)
    """Distance from the old value beyond which the critic's loss rewards no further move; unset: none."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Loop steps at the start in which the critic alone is trained."""
    bootstrap_truncated: bool = False
    """Count a truncated episode as if it went on to earn the critic's value of its last state, instead of nothing."""


class PPO(PolicyGradient):
    """Proximal policy optimisation, with a critic (role `critic`)."""

    Config: ClassVar[type[LearnerConfig]] = PPOConfig
    config: PPOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        roles = dict(super().roles)
        actor = roles["actor"]
        roles["actor"] = RoleSpec(
            trained=True, scored=actor.scored, entropy=actor.entropy, idle_steps=self.config.critic_warmup_steps
        )
        return {**roles, "critic": RoleSpec(trained=True, scored=True, head="scalar")}

    def step_advantages(self, group: Sequence[ActionTokens]) -> list[Steps]:
        return [self._of_episode(tokens) for tokens in group]

    def _of_episode(self, tokens: ActionTokens) -> Steps:
        values = tokens.read("critic", -1)  # the head at t has read token t; the state it was chosen in ends before it
        next_value = 0.0
        if self.config.bootstrap_truncated and tokens.truncated and len(tokens):
            next_value = float(tokens.samples[-1].arrays["critic"][-1])
        rewards = tokens.step_rewards(by_turn=self.config.credit == "turn") + self.kl_rewards(tokens)
        advantages = generalised_advantages(
            rewards, values, next_value=next_value, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda
        )
        for sample in tokens.samples:
            del sample.arrays["critic"]
        tokens.write("values", values)
        tokens.write("returns", advantages + values)
        return advantages

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        if role == "actor":
            return super().loss(role, outputs, batch, denominators)
        return self.critic_loss(outputs, batch, denominators)

    def critic_loss(
        self, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """The clipped value loss, aggregated as the policy's is. Rows of other objectives teach the critic nothing."""
        if batch.objective != Objective.POLICY_GRADIENT:
            return outputs.values.new_zeros(()), {}
        from .losses import critic_loss

        total, metrics = critic_loss(outputs, batch, self.config.value_clip)
        return total / denominators[batch.objective], metrics

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        metrics = super().metrics(samples)
        explained = explained_variance(samples)
        return metrics if explained is None else metrics | {"value/explained_variance": explained}


def explained_variance(samples: Sequence[TrainSample]) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens that count, with returns R and the critic's values V before the update:
    1 for a perfect critic, 0 for a constant one. None where the returns' standard deviation is less than a thousandth
    of the returns: a critic's error of their size alone would be -10^6. None too where it is what float32 leaves of
    adding values and taking them away again."""
    import numpy as np

    returns, values = (
        np.concatenate([np.zeros(0), *(s.arrays[name][s.loss_weights > 0] for s in samples if name in s.arrays)])
        for name in ("returns", "values")
    )
    if not len(returns) or returns.std() <= max(1e-3 * abs(returns).max(), 1e-6 * abs(values).max()):
        return None
    return float(1 - (returns - values).var() / returns.var())
