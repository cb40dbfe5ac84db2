"""Policy-gradient learners: their settings, and their base, which leads from rewards to advantages and to the loss.

A learner defines the advantages of a group; each formula is in `advantages.py` or `losses.py`. Nothing heavy is
imported at the top: settings are validated, and their keys suggested, where torch is not installed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.learner import Learner, LearnerConfig, LossAndMetrics, Outputs, RoleSpec, RowBatch
from envgym.settings import Settings
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
from .losses import actor_loss, kl_estimate, policy_loss_of
from .tree import learn_shared_turns_once, tree_advantages

if TYPE_CHECKING:
    from .advantages import Mask, TokenArray

Bound = Annotated[float, Field(allow_inf_nan=True)]
Credit = Literal["episode", "turn"]
Scope = Literal["batch", "batch_mean", "group", "none"]
KLEstimator = Literal["k1", "k2", "k3"]
KLTerm = Literal["reward", "loss"]
Aggregation = Literal["token", "sequence", "constant"]


class ShapingConfig(Settings):
    """Changes of the raw reward, in this order: overlong penalty, stop-properly penalty, clip."""

    clip: tuple[Bound, Bound] | None = None
    """Bounds of the raw reward, before members of a group are compared; `[0, .inf]` has a lower one alone."""
    overlong_length: int | None = Field(None, ge=1)
    """Sampled tokens of an episode from which the length penalty is full (DAPO's soft overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1, validate_default=True)
    """Tokens before `overlong_length` over which the penalty rises linearly from 0."""
    overlong_factor: float = Field(1.0, ge=0)
    """The full penalty."""
    stop_properly: float | None = Field(None, le=1)
    """Factor from 0 to 1 on the reward of a truncated episode (ProRL); a negative number replaces the reward. Unset:
    unchanged."""
    overlong_filter: bool = False
    """Do not train on truncated episodes; they still count in their group's baseline."""

    @field_validator("clip")
    @classmethod
    def _low_first(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] <= clip[1]:  # with NaN as well
            raise ValueError("the lower bound comes first")
        return clip

    @field_validator("overlong_buffer")
    @classmethod
    def _fits_the_length(cls, buffer: int | None, info: ValidationInfo) -> int | None:
        length = info.data.get("overlong_length")
        if (buffer is None) != (length is None):
            raise ValueError("shaping.overlong_length and shaping.overlong_buffer belong together: set both or neither")
        if buffer is not None and length is not None and buffer > length:
            raise ValueError(f"it cannot be longer than shaping.overlong_length ({length})")
        return buffer


class KLConfig(Settings):
    """Penalty on the KL divergence from the reference model."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model. 0: no KL and no reference model."""
    estimator: KLEstimator = "k3"
    """Estimate of the KL from the sampled tokens: `k1` log-ratio, `k2` half its square, `k3` never negative and of
    low variance. In the loss `k1` has no gradient on average; `k2` has the KL's own."""
    applied_to: KLTerm = "loss"
    """`reward`: subtract `coef` times the KL at the start of the update from each action token's reward; `loss`: add it
    to the loss."""
    target: float | None = Field(None, gt=0)
    """Target KL, in nats per token, for adapting the coefficient; unset: a constant coefficient."""
    horizon: int = Field(10000, ge=1)
    """Episodes over which the coefficient adapts."""

    @field_validator("target")
    @classmethod
    def _has_something_to_adapt(cls, target: float | None, info: ValidationInfo) -> float | None:
        if target is not None and not info.data.get("coef", 1.0):
            raise ValueError("a target adapts kl.coef, which is 0 and would stay 0")
        return target


class RewardKL(KLConfig):
    """The KL as part of the reward, by default."""

    estimator: KLEstimator = "k1"
    applied_to: KLTerm = "reward"


class SquaredKL(KLConfig):
    """The KL as half the squared log-ratio in the loss, by default: its gradient is the KL's own."""

    estimator: KLEstimator = "k2"


class CorrectionConfig(Settings):
    """Weights w = pi_trainer / pi_sampler on the policy loss, at the start of the update."""

    kind: Literal["none", "tis", "icepop", "seq_mask_tis"] = "none"
    """`tis`: w, at most `high`; `icepop`: w, and tokens with w outside [low, high] are dropped; `seq_mask_tis`: as
    `tis`, and episodes whose geometric mean of w is outside are dropped."""
    low: float = Field(0.5, ge=0)
    """Minimum w."""
    high: float = Field(5.0, gt=0, validate_default=True)
    """Maximum w."""

    @property
    def drops(self) -> bool:
        """True if it may drop tokens."""
        return self.kind in ("icepop", "seq_mask_tis")

    @field_validator("high")
    @classmethod
    def _above_low(cls, high: float, info: ValidationInfo) -> float:
        if high < info.data.get("low", 0.0):
            raise ValueError(f"it is below correction.low ({info.data['low']:g})")
        return high


class PolicyGradientConfig(LearnerConfig):
    """Settings of every policy-gradient learner."""

    # From rewards to advantages.
    shaping: ShapingConfig = ShapingConfig()
    credit: Credit = "episode"
    """`episode`: the reward counts for all tokens of the episode; `turn`: a turn's reward counts for the tokens up to
    it."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount from one action token to the next. Feedback tokens are not discounted."""
    advantage_norm: Scope = "none"
    """Normalise advantages to mean 0 and standard deviation 1 over the tokens of the rollout (`batch`) or of each group
    (`group`); only to mean 0 over the rollout (`batch_mean`); or not at all."""
    kl: KLConfig = KLConfig()

    # The loss.
    policy_loss: str = "ppo"
    """`ppo`: clipped ratio of each token; `gspo`: of each episode; `cispo`: bounded weight on log pi; `reinforce`:
    log pi without a ratio; another package's by its name, or `file.py:Name`."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio to the old policy is bounded at 1 - clip_low from below."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is bounded at 1 + clip_high from above."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of a negative advantage, whatever the ratio: this times the advantage."""
    aggregation: Aggregation = "token"
    """`token`: mean over all tokens of the optimizer step; `sequence`: mean over episodes of their token means;
    `constant`: sum over tokens divided by episodes times `constant_length`."""
    constant_length: int = Field(1024, ge=1)
    """The length that `constant` aggregation divides by."""
    correction: CorrectionConfig = CorrectionConfig()
    old_logprobs: Literal["auto", "rollout", "recompute"] = "auto"
    """The old policy of the ratio: `rollout` the sampler's, `recompute` the trainer's at the start of the
    update. `auto`: the sampler's if a rollout is one optimizer step and nothing else needs the trainer's."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    pretrain_coef: float = Field(1.0, ge=0)
    """Weight of the cross-entropy of pre-training rows, if the run mixes some in."""

    @field_validator("policy_loss")
    @classmethod
    def _has_a_class(cls, name: str) -> str:
        policy_loss_of(name)
        return name

    @field_validator("dual_clip")
    @classmethod
    def _clips_a_ratio(cls, dual_clip: float | None, info: ValidationInfo) -> float | None:
        name = info.data.get("policy_loss")
        if dual_clip is not None and name is not None and not policy_loss_of(name).has_dual_clip:
            raise ValueError(f"policy_loss {name} has no clipped ratio that a dual clip could bound")
        return dual_clip

    @field_validator("old_logprobs")
    @classmethod
    def _are_the_trainers_where_needed(cls, source: str, info: ValidationInfo) -> str:
        if source == "rollout" and (needs := _needs_recompute(info.data)):
            raise ValueError(
                f"{needs} compares the trainer's own log-probabilities at the start of the update: "
                "set old_logprobs to recompute or auto"
            )
        return source

    @property
    def recomputes(self) -> bool:
        """True if the old log-probabilities are the trainer's."""
        if self.old_logprobs == "auto":
            return self.update_epochs * self.minibatches > 1 or _needs_recompute(vars(self)) is not None
        return self.old_logprobs == "recompute"

    @property
    def scores_actor(self) -> bool:
        """True if old log-probabilities need a separate forward pass: with several optimizer steps per rollout. A
        single step's own pass has the old weights."""
        return self.recomputes and self.update_epochs * self.minibatches > 1

    @property
    def needs_correction(self) -> bool:
        """True if samples of older policies need a `correction`: the loss has no ratio to the policy that sampled."""
        return self.recomputes or not policy_loss_of(self.policy_loss).has_ratio


def _needs_recompute(settings: Mapping[str, Any]) -> str | None:
    kind = getattr(settings.get("correction"), "kind", "none")
    if kind != "none":
        return f"correction {kind}"
    name = settings.get("policy_loss")
    return f"policy_loss {name}" if name is not None and policy_loss_of(name).needs_old_logprobs else None


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
        is_plain = self.config.shaping == ShapingConfig()
        self.returns = {e.rows[0].episode_index: sum(e.rewards) for e in episodes if e.rows} if is_plain else None
        for tokens, values in zip(episodes, chain.from_iterable(advantages), strict=True):
            tokens.write("advantages", values)
            self._apply_aggregation(tokens.rows)
        return [row for tokens in episodes for row in tokens.rows]

    def _no_signal(
        self, groups: Sequence[Sequence[ActionTokens]], advantages: Sequence[Sequence[TokenArray]]
    ) -> list[list[Mask]]:
        """[n] bool for each episode of each group: the tokens of turns with equal rewards. Empty for learners that are
        not group-relative: there equal rewards do carry a signal; and without a norm, which needs no masks."""
        if self.min_group_size < 2 or self.config.advantage_norm == "none":
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

    @property
    def skips_truncated(self) -> bool:  # type: ignore[override]
        return self.config.shaping.overlong_filter

    def token_shares(self, objective: Objective, weights: Mapping[int, float]) -> Mapping[int, float] | None:
        if objective is not Objective.POLICY_GRADIENT or not policy_loss_of(self.config.policy_loss).is_linear:
            return None
        if self.config.aggregation == "token":
            return dict.fromkeys(weights, 1 / max(1e-8, sum(weights.values())))
        length, n = self.config.constant_length, len(weights)
        is_constant = self.config.aggregation == "constant"
        return {index: 1 / (n * (length if is_constant else max(1e-8, total))) for index, total in weights.items()}

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

    def turn_values(self, group: Sequence[ActionTokens]) -> Sequence[Sequence[float]]:
        """The advantages of each turn of each member of a group."""
        to_go = [rewards_to_go(member.rewards, member.turn_ends, self.config.gamma) for member in group]
        return turn_advantages(to_go, [member.reward for member in group], self._checked_advantages)

    def token_advantages(self, group: Sequence[ActionTokens]) -> list[TokenArray]:
        gamma, values = self.config.gamma, self.turn_values(group)
        advantages = [broadcast_turn_values(v, m.turn_ends, gamma) for v, m in zip(values, group, strict=True)]
        if not self.kl_in_reward:
            return advantages
        kl_returns = [discounted_returns(self.kl_rewards(member), gamma) for member in group]
        return [advantage + kl_return for advantage, kl_return in zip(advantages, kl_returns, strict=True)]

    def _checked_advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        advantages = self.advantages(rewards)
        if advantages is None or len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            returned = f"{advantages!r:.60} for {len(rewards)} members of a group: one finite number for each"
            raise self.wrong_return(self.advantages, returned)
        return advantages


class TreeConfig(PolicyGradientConfig):
    """Settings of learners that may compare the turns of a tree."""

    advantage: Literal["group", "tree"] = Field("group", validate_default=True)
    """`group`: episodes are compared within their group; `tree`: with `rollout.branches`, each turn by the mean return
    below it, with the others in its state; turns that episodes share are learned once, with the weight of all of
    them."""

    @field_validator("advantage")
    @classmethod
    def _is_all_the_credit(cls, advantage: str, info: ValidationInfo) -> str:
        if advantage == "tree" and info.data.get("credit", "episode") != "episode":
            raise ValueError("a tree gives each turn its credit: leave credit at episode")
        if advantage == "tree" and info.data.get("gamma", 1.0) != 1:
            raise ValueError("a tree compares returns without a discount: leave gamma at 1")
        return advantage


class TreeLearner(CriticFreeLearner):
    """Base of the critic-free learners that may compare the turns of a tree."""

    Config = TreeConfig
    config: TreeConfig
    _has_branches = False
    """True if the last `prepare` had a tree."""

    def sibling_advantages(self, values: Sequence[float], returns: Sequence[float]) -> Sequence[float]:
        """One advantage per turn of several in the same state, from their values; `returns` are those of the group."""
        return self.advantages(values)

    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        rows = super().prepare(groups)
        branched = [group for group in groups if any(episode.parent for episode in group.episodes)]
        self._has_branches = self.config.advantage == "tree" and bool(branched)
        if self._has_branches:
            self.returns = None  # they do not decide the sign of a shared turn
            for group in branched:
                learn_shared_turns_once([e for e in group.episodes if e.rows and "advantages" in e.rows[0].arrays])
        return rows

    def token_shares(self, objective: Objective, weights: Mapping[int, float]) -> Mapping[int, float] | None:
        return None if self._has_branches else super().token_shares(objective, weights)

    def turn_values(self, group: Sequence[ActionTokens]) -> Sequence[Sequence[float]]:
        if self.config.advantage != "tree":
            return super().turn_values(group)
        returns = [member.reward for member in group]
        n_turns = [len(member.turn_ends) for member in group]
        return tree_advantages([member.episode for member in group], n_turns, returns, self.sibling_advantages)

    def _action_tokens(self, episode: Episode) -> ActionTokens:
        tokens = super()._action_tokens(episode)
        if self.config.advantage == "tree":
            by_turn = ActionTokens.from_episode(episode, tokens.reward, "turn")
            tokens.turn_ends, tokens.rewards = by_turn.turn_ends, by_turn.rewards
        return tokens


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

    parts = [(row, row.arrays["advantages"][row.loss_weights > 0]) for row in rows]
    parts = [(row, tokens) for row, tokens in parts if len(tokens)]
    if not parts:
        return {}
    tokens = np.concatenate([tokens for _, tokens in parts]).astype(np.float64)
    lengths = np.array([len(tokens) for _, tokens in parts])
    sums = np.add.reduceat(tokens, np.cumsum(lengths) - lengths)
    indices = np.array([(row.episode_index, row.group_index) for row, _ in parts])
    _, first, episode = np.unique(indices[:, 0], return_index=True, return_inverse=True)
    means = np.bincount(episode, sums) / np.bincount(episode, lengths)
    _, group, sizes = np.unique(indices[first, 1], return_inverse=True, return_counts=True)
    deviations = means - (np.bincount(group, means) / sizes)[group]
    return {
        "advantage/mean": float(tokens.mean()),
        "advantage/std": float(tokens.std()),
        "advantage/max_abs": float(np.abs(tokens).max()),
        "advantage/group_spread": float(np.sqrt(np.bincount(group, deviations**2) / sizes).mean()),
    }
