"""PPO: a critic estimates the value of each state; an advantage is the return relative to that estimate.

Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with generalised advantage estimation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from envgym.learner import LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Objective, Row

from .advantages import ActionTokens, gae_advantages
from .losses import critic_loss
from .policy_gradient import Credit, PolicyGradient, PolicyGradientConfig, RewardKL, Scope

if TYPE_CHECKING:
    from .advantages import TokenArray


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 uses the critic after one token, 1 the actual returns."""
    value_clip: float | None = Field(0.5, gt=0)
    """Distance from the old value beyond which the critic's loss is clipped; unset: no clip."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Training steps at the start in which only the critic is trained."""
    bootstrap_truncated: bool = False
    """Add the critic's value of the last state to the return of a truncated episode."""


class PPO(PolicyGradient):
    """Proximal policy optimisation, with a critic (role `critic`)."""

    Config = PPOConfig
    config: PPOConfig

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        roles = super().roles
        actor = replace(roles["actor"], frozen_steps=self.config.critic_warmup_steps)
        return {**roles, "actor": actor, "critic": RoleSpec(trained=True, scored=True, head="scalar")}

    def token_advantages(self, group: Sequence[ActionTokens]) -> list[TokenArray]:
        return [self._episode_advantages(tokens) for tokens in group]

    def _episode_advantages(self, tokens: ActionTokens) -> TokenArray:
        # V(s_t) is the head's output at t - 1: its output at t has already seen token t.
        values = tokens.read("critic", -1)
        next_value = 0.0
        if self.config.bootstrap_truncated and tokens.truncated and len(tokens):
            next_value = float(tokens.rows[-1].arrays["critic"][-1])
        rewards = tokens.token_rewards() + self.kl_rewards(tokens)
        advantages = gae_advantages(
            rewards, values, next_value=next_value, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda
        )
        for row in tokens.rows:
            del row.arrays["critic"]
        tokens.write("values", values)
        tokens.write("returns", advantages + values)
        return advantages

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        """The actor's policy loss or the critic's clipped value loss. `normalizers` divide each objective's loss
        sum."""
        if role == "actor":
            return super().loss(role, outputs, batch, normalizers)
        # The critic's loss is aggregated as the policy's is. Pre-training text trains only the actor.
        if batch.objective != Objective.POLICY_GRADIENT:
            return outputs.values.new_zeros(()), {}
        total, metrics = critic_loss(outputs, batch, self.config.value_clip)
        return total / normalizers[batch.objective], metrics

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        return super().metrics(rows) | explained_variance(rows)


def explained_variance(rows: Sequence[Row]) -> dict[str, float]:
    """`value/explained_variance`: 1 - Var(R - V) / Var(R) over the tokens of positive weight, with returns R and the
    critic's values V before the update: 1 for a perfect critic, 0 for a constant one.

    Absent if the standard deviation of R is below a thousandth of max |R|, where an error of the size of R alone would
    give -10^6, or below a millionth of max |V|, the rounding error of float32 values.
    """
    import numpy as np

    returns, values = (
        np.concatenate([np.zeros(0), *(row.arrays[name][row.loss_weights > 0] for row in rows if name in row.arrays)])
        for name in ("returns", "values")
    )
    if not len(returns) or returns.std() <= max(1e-3 * abs(returns).max(), 1e-6 * abs(values).max()):
        return {}
    return {"value/explained_variance": float(1 - (returns - values).var() / returns.var())}
