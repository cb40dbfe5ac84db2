"""The base of policy-gradient learners: the order of steps from rewards to advantages, and the policy's loss.

A learner defines the advantages of a group; each formula is in `advantages.py` or `losses.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from envgym.learner import Learner, LearnerConfig, Metrics, Outputs, RoleSpec, RowBatch, TrainSample, Trajectory
from envgym.types import Objective, Status

from .advantages import (
    ActionTokens,
    discounted_returns,
    normalised,
    rewards_to_go,
    shaped_reward,
    spread,
    turn_advantages,
    without_variance,
)
from .settings import PolicyGradientConfig

if TYPE_CHECKING:
    import torch

    from .advantages import Mask, Steps


class PolicyGradient(Learner):
    """Base of the learners that weigh sampled tokens by an advantage. A subclass defines the advantages."""

    Config: ClassVar[type[LearnerConfig]] = PolicyGradientConfig
    config: PolicyGradientConfig
    needs_samples = True

    def __init__(self, config: LearnerConfig) -> None:
        super().__init__(config)
        self.kl_coef = self.config.kl.coef
        """The coefficient in use; it moves where `kl.target` is set."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        actor = RoleSpec(trained=True, scored=self.config.scores_actor, entropy=self.config.entropy_coef > 0)
        return {"actor": actor} | ({"reference": RoleSpec()} if self.config.kl.coef > 0 else {})

    # -- from rewards to advantages -----------------------------------------------------------------------

    @abstractmethod
    def step_advantages(self, group: Sequence[ActionTokens]) -> list[Steps]:
        """[n] advantages of each episode of a group, one for each of its action tokens."""

    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        rewarded = [[trajectory for trajectory in group if trajectory.episode.reward is not None] for group in groups]
        # Of smaller groups members failed: there is nothing left to compare with.
        whole = [group for group in rewarded if len(group) >= self.min_group_size]
        members = [[self._action_tokens(trajectory) for trajectory in group] for group in whole]
        raw = [self.step_advantages(group) for group in members]
        advantages = normalised(raw, self.config.advantage_norm, self._without_signal(members, raw))
        episodes = [tokens for group in members for tokens in group]
        for tokens, values in zip(episodes, chain.from_iterable(advantages), strict=True):
            tokens.write("advantages", values)
            self._finish(tokens.samples)
        return [sample for tokens in episodes for sample in tokens.samples]

    def _without_signal(
        self, groups: Sequence[Sequence[ActionTokens]], advantages: Sequence[Sequence[Steps]]
    ) -> list[list[Mask]]:
        """[n] bool for each episode of each group: the tokens of turns that nobody did better than the others. Empty
        without a baseline by which equal rewards would say nothing."""
        if self.min_group_size < 2:
            return []
        by_turn = self.config.credit == "turn"
        turn_ends = [[tokens.turn_ends if by_turn else [len(tokens)] for tokens in group] for group in groups]
        return [without_variance(*of_group) for of_group in zip(advantages, turn_ends, strict=True)]

    def _action_tokens(self, trajectory: Trajectory) -> ActionTokens:
        if self.config.shaping.overlong_filter and trajectory.episode.outcome.status is Status.TRUNCATED:
            for sample in trajectory.samples:
                sample.loss_weights[:] = 0.0
        return ActionTokens.of(trajectory, shaped_reward(trajectory.episode, self.config.shaping))

    @property
    def kl_in_reward(self) -> bool:
        """The KL is part of the reward."""
        return self.config.kl.place != "loss" and self.config.kl.coef != 0

    def kl_rewards(self, tokens: ActionTokens) -> Steps:
        """[n] Minus each action token's share of the KL penalty: 0 where that is no part of the reward."""
        import numpy as np

        if not self.kl_in_reward:
            return np.zeros(len(tokens))
        import torch

        from .losses import kl_estimate

        old = torch.from_numpy(tokens.read("actor" if self.config.scores_actor else "old_logprobs"))
        reference = torch.from_numpy(tokens.read("reference"))
        rewards = -self.kl_coef * kl_estimate(old, reference, self.config.kl.estimator)
        if self.config.correction.drops:  # what is not a number there is dropped, and must not reach other tokens
            rewards = torch.where(old.isfinite(), rewards, 0.0)
        steps: Steps = rewards.numpy()
        return steps

    def _finish(self, samples: Sequence[TrainSample]) -> None:
        """Make an episode's samples what the loss reads."""
        import numpy as np

        total = sum(float(sample.loss_weights.sum()) for sample in samples)
        for sample in samples:
            if self.config.kl.target is not None and self.config.kl.place == "loss":
                sample.arrays["kl_coef"] = np.full(len(sample), self.kl_coef, np.float32)
            if self.config.aggregation == "sequence" and total > 0:  # one episode counts once, whatever its rows
                sample.loss_weights = sample.loss_weights / np.float32(total)

    def denominators(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        totals = super().denominators(samples)
        episodes = {sample.episode for sample in samples if sample.objective == Objective.POLICY_GRADIENT}
        if self.config.aggregation != "token" and episodes:
            length = self.config.constant_length if self.config.aggregation == "constant" else 1
            totals[Objective.POLICY_GRADIENT] = float(len(episodes) * length)
        return totals

    # -- the loss -----------------------------------------------------------------------------------------

    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        if batch.objective == Objective.CROSS_ENTROPY:
            return self.pretraining_loss(outputs, batch, denominators)
        return self.actor_loss(outputs, batch, denominators)

    def actor_loss(
        self, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """The policy's loss of policy-gradient rows."""
        from .losses import actor_loss

        total, metrics = actor_loss(outputs, batch, self.config)
        return total / denominators[batch.objective], metrics

    def pretraining_loss(
        self, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """`pretrain_coef` times the cross-entropy of text that is taught as it stands, a mean over its tokens.

        Source: the PPO-ptx objective of L. Ouyang et al., "Training language models to follow instructions with human
        feedback" (2022), eq. 2.
        """
        from .losses import cross_entropy

        total, metric = cross_entropy(outputs, batch)
        return self.config.pretrain_coef * total / denominators[batch.objective], {"pretrain/loss": metric}

    # -- metrics and adaptation ---------------------------------------------------------------------------

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        samples = [sample for sample in samples if sample.objective == Objective.POLICY_GRADIENT]
        metrics = advantage_metrics(samples) | {"learner/episodes": float(len({s.episode for s in samples}))}
        return metrics | ({"policy/kl_coef": self.kl_coef} if self.config.kl.coef > 0 else {})

    def observe(self, record: Mapping[str, Any]) -> None:
        kl = self.config.kl
        if kl.target is not None and "policy/kl" in record:
            episodes = round(record["learner/episodes"])
            self.kl_coef = adapted(
                self.kl_coef, record["policy/kl"], target=kl.target, horizon=kl.horizon, episodes=episodes
            )

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = float(state["kl_coef"])


class CriticFreeLearner(PolicyGradient):
    """Base of REINFORCE++, RLOO, GRPO and the like: an advantage is what was really earned, against what others of the
    group earned. A subclass is one function: `advantages`."""

    @abstractmethod
    def advantages(self, values: Sequence[float], rewards: Sequence[float]) -> Sequence[float]:
        """One advantage for each of several members of a group: what member i earned, `values[i]`, against `rewards`,
        what the members earned.

        The two are the same, but for a turn that fewer than two members reached: there `values[i]` is what was earned
        from that turn on, and `rewards` are those of the whole episodes.
        """

    def step_advantages(self, group: Sequence[ActionTokens]) -> list[Steps]:
        gamma = self.config.gamma
        rewards = [member.reward for member in group]
        if self.config.credit == "turn":
            to_go = [rewards_to_go(member.rewards, member.turn_ends, gamma) for member in group]
            by_turn = turn_advantages(to_go, rewards, self._checked_advantages)
            earned = [spread(own, member.turn_ends, gamma) for own, member in zip(by_turn, group, strict=True)]
        else:
            of_episodes = self._checked_advantages(rewards, rewards)
            earned = [spread([own], [len(member)], gamma) for own, member in zip(of_episodes, group, strict=True)]
        if not self.kl_in_reward:
            return earned
        return [own + discounted_returns(self.kl_rewards(m), gamma) for own, m in zip(earned, group, strict=True)]

    def _checked_advantages(self, values: Sequence[float], rewards: Sequence[float]) -> Sequence[float]:
        found = self.advantages(values, rewards)
        if found is None or len(found) != len(values):
            returned = f"{found!r:.60} for {len(values)} members of a group: one number for each"
            raise self.wrong_return(self.advantages, returned)
        return found


def adapted(coef: float, kl: float, *, target: float, horizon: int, episodes: int) -> float:
    """The coefficient after `episodes` more episodes whose mean KL was `kl`: a proportional controller in log space.

    Source: D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2:
    coef (1 + clip(kl / target - 1, -0.2, 0.2) episodes / horizon), not below 0.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * max(0.0, 1 + error * episodes / horizon)


def advantage_metrics(samples: Sequence[TrainSample]) -> dict[str, float]:
    """`advantage/mean`, `std` and `max_abs` over the tokens that count, and `advantage/group_spread`: the standard
    deviation (biased) of the episodes' mean advantages within their group, averaged over groups."""
    import numpy as np

    by_group: dict[int, dict[int, list[np.ndarray]]] = {}
    for sample in samples:
        tokens = sample.arrays["advantages"][sample.loss_weights > 0]
        if len(tokens):
            by_group.setdefault(sample.group, {}).setdefault(sample.episode, []).append(tokens)
    if not by_group:
        return {}
    episodes = {group: [np.concatenate(parts) for parts in own.values()] for group, own in by_group.items()}
    tokens = np.concatenate([tokens for own in episodes.values() for tokens in own]).astype(np.float64)
    return {
        "advantage/mean": float(tokens.mean()),
        "advantage/std": float(tokens.std()),
        "advantage/max_abs": float(np.abs(tokens).max()),
        "advantage/group_spread": float(np.mean([np.std([own.mean() for own in of]) for of in episodes.values()])),
    }
