"""PPO: a critic says what each state is worth, and an advantage is how much better than that things went.

Source: J. Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with generalised advantage estimation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from envgym.learner import LearnerConfig, LearnRow, Metrics, Outputs, RoleSpec, RowBatch
from envgym.types import Objective

from .credit import Credit
from .health import explained_variance
from .kl import RewardKL
from .normalisation import Scope
from .policy_gradient import PolicyGradient, PolicyGradientConfig
from .returns import generalised_advantages
from .time_line import TimeLine
from .value_loss import state_values, value_loss

if TYPE_CHECKING:
    import torch

    from .returns import Steps


class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    credit: Credit = "turn"
    advantage_norm: Scope = "batch"
    kl: RewardKL = RewardKL()
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """From 0, which trusts the critic for all but the next token, to 1, which trusts what was really earned."""
    value_clip: float | None = Field(0.5, gt=0)
    """How far a value may move from the old one before the critic's loss stops rewarding it; unset: any distance."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Loop steps at the start in which the critic alone is trained."""
    bootstrap_truncated: bool = False
    """A truncated episode would have gone on to earn what the critic says of its last state, not nothing."""


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

    def step_advantages(self, group: Sequence[TimeLine]) -> list[Steps]:
        return [self._of_episode(line) for line in group]

    def _of_episode(self, line: TimeLine) -> Steps:
        values = line.read("critic", -1)  # the head at t has read token t; the state it was chosen in ends before it
        next_value = 0.0
        if self.config.bootstrap_truncated and line.truncated and len(line):
            next_value = float(line.rows[-1].arrays["critic"][-1])
        rewards = line.step_rewards(by_turn=self.config.credit == "turn") + self.kl_rewards(line)
        advantages = generalised_advantages(
            rewards, values, next_value=next_value, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda
        )
        for row in line.rows:
            del row.arrays["critic"]
        line.write("values", values)
        line.write("returns", advantages + values)
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
        import torch

        if batch.objective != Objective.POLICY_GRADIENT:
            return outputs.values.new_zeros(()), {}
        counts = batch.weights > 0
        values, old, returns = (
            torch.where(counts, tensor, 0.0)
            for tensor in (state_values(outputs.values), batch.arrays["values"], batch.arrays["returns"])
        )
        losses, clipped = value_loss(values, old, returns, self.config.value_clip)
        total = (batch.weights * losses).sum()
        summed, weight, n_clipped, n_tokens, value = torch.stack(
            [total.detach(), batch.weights.sum(), clipped.sum(), counts.sum(), values.detach().sum()]
        ).tolist()
        metrics: Metrics = {
            "loss": (summed, weight),
            "clip_fraction": (n_clipped, n_tokens),
            "value/mean": (value, n_tokens),
        }
        return total / denominators[batch.objective], metrics

    def metrics(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        told = super().metrics(rows)
        explained = explained_variance(rows)
        return told if explained is None else told | {"value/explained_variance": explained}
