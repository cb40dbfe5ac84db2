"""The base of policy-gradient learners: the way from rewards to advantages, and the policy's loss.

A learner defines the advantages of a group; each formula is in `advantages.py` or `losses.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from envgym.learner import Learner, LearnerConfig, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Group, Objective, Row, Status

from .advantages import (
    ActionTokens,
    broadcast_turn_values,
    discounted_returns,
    no_signal_masks,
    normalize_advantages,
    rewards_to_go,
    shaped_reward,
    turn_advantages,
)
from .settings import KLEstimator, PolicyGradientConfig

if TYPE_CHECKING:
    from .advantages import Mask, TokenArray


class PolicyGradient(Learner):
    """Base of the learners that weight sampled tokens by an advantage. A subclass defines the advantages."""

    Config = PolicyGradientConfig
    config: PolicyGradientConfig
    needs_policy_samples = True

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(config)
        self.kl_coef = self.config.kl.coef
        """The current KL coefficient; it is adapted if `kl.target` is set."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        actor = RoleSpec(trained=True, scored=self.config.scores_actor, entropy=self.config.entropy_coef > 0)
        return {"actor": actor} | ({"reference": RoleSpec()} if self.config.kl.coef > 0 else {})

    # -- from rewards to advantages -----------------------------------------------------------------------

    @abstractmethod
    def token_advantages(self, group: Sequence[ActionTokens]) -> list[TokenArray]:
        """[n] advantages of each episode of a group, one per action token."""

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        rewarded = [[episode for episode in group.episodes if episode.reward is not None] for group in groups]
        # Members of smaller groups failed, so that the rest has no baseline.
        complete_groups = [group for group in rewarded if len(group) >= self.min_group_size]
        members = [[self._action_tokens(episode) for episode in group] for group in complete_groups]
        raw_advantages = [self.token_advantages(group) for group in members]
        no_signal = self._no_signal(members, raw_advantages)
        advantages = normalize_advantages(raw_advantages, self.config.advantage_norm, no_signal)
        episodes = [tokens for group in members for tokens in group]
        for tokens, values in zip(episodes, chain.from_iterable(advantages), strict=True):
            tokens.write("advantages", values)
            self._apply_aggregation(tokens.rows)
        return [row for tokens in episodes for row in tokens.rows]

    def _no_signal(
        self, groups: Sequence[Sequence[ActionTokens]], advantages: Sequence[Sequence[TokenArray]]
    ) -> list[list[Mask]]:
        """[n] bool for each episode of each group: the tokens of turns with equal rewards. Empty for learners that are
        not group-relative: there equal rewards do carry a signal."""
        if self.min_group_size < 2:
            return []
        turn_ends = [[tokens.turn_ends for tokens in group] for group in groups]
        return [no_signal_masks(group, ends) for group, ends in zip(advantages, turn_ends, strict=True)]

    def _action_tokens(self, episode: Episode) -> ActionTokens:
        if self.config.shaping.overlong_filter and episode.outcome.status is Status.TRUNCATED:
            for row in episode.rows:
                row.loss_weights[:] = 0.0
        return ActionTokens.from_episode(episode, shaped_reward(episode, self.config.shaping), self.config.credit)

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL penalty is part of the reward."""
        return self.config.kl.applied_to != "loss" and self.config.kl.coef != 0

    def kl_rewards(self, tokens: ActionTokens) -> TokenArray:
        """[n] The negative KL penalty of each action token; 0 if the KL is not part of the reward."""
        import numpy as np

        if not self.kl_in_reward:
            return np.zeros(len(tokens))
        import torch

        from .losses import kl_estimate

        old = torch.from_numpy(tokens.read("actor" if self.config.scores_actor else "old_logprobs"))
        reference = torch.from_numpy(tokens.read("reference"))
        rewards = -self.kl_coef * kl_estimate(old, reference, self.config.kl.estimator)
        if self.config.correction.drops:  # tokens with NaN are dropped later; the NaN must not reach others
            rewards = torch.where(old.isfinite(), rewards, 0.0)
        result: TokenArray = rewards.numpy()
        return result

    def _apply_aggregation(self, rows: Sequence[Row]) -> None:
        """Rescale an episode's loss weights for `sequence` aggregation; store an adaptive KL coefficient per token."""
        import numpy as np

        total = sum(float(row.loss_weights.sum()) for row in rows)
        for row in rows:
            if self.config.kl.target is not None and self.config.kl.applied_to == "loss":
                row.arrays["kl_coef"] = np.full(len(row), self.kl_coef, np.float32)
            if self.config.aggregation == "sequence" and total > 0:  # an episode counts once
                row.loss_weights = row.loss_weights / np.float32(total)

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        totals = super().loss_normalizers(rows)
        episodes = {row.episode_index for row in rows if row.objective == Objective.POLICY_GRADIENT}
        if self.config.aggregation != "token" and episodes:
            length = self.config.constant_length if self.config.aggregation == "constant" else 1
            totals[Objective.POLICY_GRADIENT] = float(len(episodes) * length)
        return totals

    # -- the loss -----------------------------------------------------------------------------------------

    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        if batch.objective != Objective.CROSS_ENTROPY:
            return self.actor_loss(outputs, batch, normalizers)
        # `pretrain_coef` times the cross-entropy of pre-training text, a mean over its tokens. Source: the PPO-ptx
        # objective of L. Ouyang et al., "Training language models to follow instructions with human feedback" (2022),
        # eq. 2.
        nll = batch.weighted_sum(-outputs.logprobs)
        metrics = {"pretrain/loss": (float(nll.detach()), float(batch.loss_weights.sum()))}
        return self.config.pretrain_coef * nll / normalizers[batch.objective], metrics

    def actor_loss(self, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        """The policy-gradient loss of the policy."""
        from .losses import actor_loss

        total, metrics = actor_loss(outputs, batch, self.config)
        return total / normalizers[batch.objective], metrics

    # -- metrics and adaptation ---------------------------------------------------------------------------

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        rows = [row for row in rows if row.objective == Objective.POLICY_GRADIENT]
        metrics = advantage_metrics(rows) | {"learner/episodes": float(len({row.episode_index for row in rows}))}
        return metrics | ({"policy/kl_coef": self.kl_coef} if self.config.kl.coef > 0 else {})

    def end_step(self, rows: Sequence[Row]) -> None:
        """Adapt the KL coefficient to the KL that the first pass over the rows measured."""
        config = self.config.kl
        if config.target is not None and (kl := mean_kl(rows, config.estimator)) is not None:
            episodes = len({row.episode_index for row in rows if row.objective == Objective.POLICY_GRADIENT})
            self.kl_coef = adapt_kl_coef(
                self.kl_coef, kl, target=config.target, horizon=config.horizon, episodes=episodes
            )

    def state_dict(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = float(state["kl_coef"])


class CriticFreeLearner(PolicyGradient):
    """Base of REINFORCE++, RLOO, GRPO and the like: an advantage compares an episode's return with its group's returns.
    A subclass is one function: `advantages`."""

    @abstractmethod
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        """One advantage per member of a group, from the members' rewards: those of whole episodes or, with `credit:
        turn`, the returns from a turn on."""

    def token_advantages(self, group: Sequence[ActionTokens]) -> list[TokenArray]:
        gamma = self.config.gamma
        to_go = [rewards_to_go(member.rewards, member.turn_ends, gamma) for member in group]
        values = turn_advantages(to_go, [member.reward for member in group], self._checked_advantages)
        advantages = [broadcast_turn_values(v, m.turn_ends, gamma) for v, m in zip(values, group, strict=True)]
        if not self.kl_in_reward:
            return advantages
        kl_returns = [discounted_returns(self.kl_rewards(member), gamma) for member in group]
        return [advantage + kl_return for advantage, kl_return in zip(advantages, kl_returns, strict=True)]

    def _checked_advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        advantages = self.advantages(rewards)
        if advantages is None or len(advantages) != len(rewards):
            returned = f"{advantages!r:.60} for {len(rewards)} members of a group: one number for each"
            raise self.wrong_return(self.advantages, returned)
        return advantages


def adapt_kl_coef(coef: float, kl: float, *, target: float, horizon: int, episodes: int) -> float:
    """The coefficient after `episodes` more episodes whose mean KL was `kl`: a proportional controller in log space.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2:
    coef (1 + clip(kl / target - 1, -0.2, 0.2) episodes / horizon), not below 0.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * max(0.0, 1 + error * episodes / horizon)


def mean_kl(rows: Sequence[Row], estimator: KLEstimator) -> float | None:
    """The mean KL to the reference, in nats per token of positive weight, of the policy of the step's first pass over
    each row; None if there was no pass."""
    import torch

    from .losses import kl_estimate

    pairs = [
        (row.first_outputs[row.loss_weights > 0], row.arrays["reference"][row.loss_weights > 0])
        for row in rows
        if row.first_outputs is not None and row.objective == Objective.POLICY_GRADIENT
    ]
    tensors = [(torch.from_numpy(logprobs), torch.from_numpy(reference)) for logprobs, reference in pairs]
    estimates = [kl_estimate(logprobs, reference, estimator).double() for logprobs, reference in tensors]
    return float(torch.cat(estimates).mean()) if sum(map(len, estimates)) else None


def advantage_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """`advantage/mean`, `std` and `max_abs` over tokens of positive weight, and `advantage/group_spread`: the biased
    standard deviation of the episodes' mean advantages within a group, averaged over groups."""
    import numpy as np

    by_group: dict[int, dict[int, list[np.ndarray]]] = {}
    for row in rows:
        tokens = row.arrays["advantages"][row.loss_weights > 0]
        if len(tokens):
            by_group.setdefault(row.group_index, {}).setdefault(row.episode_index, []).append(tokens)
    if not by_group:
        return {}
    groups = [[np.concatenate(parts) for parts in episodes.values()] for episodes in by_group.values()]
    tokens = np.concatenate([tokens for group in groups for tokens in group]).astype(np.float64)
    return {
        "advantage/mean": float(tokens.mean()),
        "advantage/std": float(tokens.std()),
        "advantage/max_abs": float(np.abs(tokens).max()),
        "advantage/group_spread": float(np.mean([np.std([tokens.mean() for tokens in group]) for group in groups])),
    }
