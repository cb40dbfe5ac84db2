"""What policy-gradient learners share: the order of steps from rewards to advantages, and the policy's loss.

A learner says what the advantages of a group are (`step_advantages`); each formula is in the file that is named for
it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.learner import Learner, LearnerConfig, LearnRow, Metrics, Outputs, RoleSpec, RowBatch
from envgym.types import Episode, Group, Objective, Status

from .correction import CorrectionConfig, correction
from .credit import Credit
from .health import advantage_metrics, token_metrics
from .kl import KLConfig, adapted, kl_estimate
from .normalisation import Scope, normalised, without_variance
from .policy_loss import PolicyLoss, cispo_loss, clipped_policy_loss, reinforce_loss, sequence_log_ratio
from .reward_shaping import ShapingConfig, shaped_reward
from .time_line import TimeLine

if TYPE_CHECKING:
    import torch

    from .policy_loss import Loss
    from .returns import Steps

Aggregation = Literal["token", "sequence", "constant"]


class PolicyGradientConfig(LearnerConfig):
    """Settings of every policy-gradient learner."""

    # From rewards to advantages.
    shaping: ShapingConfig = ShapingConfig()
    credit: Credit = "episode"
    """`episode`: the reward counts for all of an episode's tokens; `turn`: what a turn was paid counts for the tokens
    up to it."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount from one action token to the next. What the environment says takes no time."""
    advantage_norm: Scope = "none"
    """Advantages are brought to mean 0 and standard deviation 1 over the tokens of the whole rollout (`batch`), of each
    group by itself, or not at all."""
    kl: KLConfig = KLConfig()

    # The loss.
    policy_loss: PolicyLoss = "ppo"
    """`ppo`: clipped ratio of each token; `gspo`: of each episode; `cispo`: bounded weight on log pi; `reinforce`:
    log pi alone."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio to the old policy is bounded at 1 - clip_low from below."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is bounded at 1 + clip_high from above."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a negative advantage, however large the ratio, at this times the advantage."""
    aggregation: Aggregation = "token"
    """`token`: mean over all tokens of the step; `sequence`: mean over episodes of each one's token mean;
    `constant`: sum over tokens divided by episodes times `constant_length`."""
    constant_length: int = Field(1024, ge=1)
    """The length that `constant` aggregation divides by."""
    correction: CorrectionConfig = CorrectionConfig()
    old_logprobs: Literal["auto", "rollout", "recompute"] = "auto"
    """The old policy of the ratio: `rollout` as the sampler said, `recompute` as the trainer says at the start of the
    update. `auto`: the sampler's where a rollout is one optimizer step, unless something needs the trainer's."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the policy's entropy, which the loss then raises."""
    pretrain_coef: float = Field(1.0, ge=0)
    """Weight of the cross-entropy of pre-training rows, where the run mixes some in."""

    @field_validator("dual_clip")
    @classmethod
    def _clips_a_ratio(cls, dual_clip: float | None, info: ValidationInfo) -> float | None:
        kind = info.data.get("policy_loss")
        if dual_clip is not None and kind in ("cispo", "reinforce"):
            raise ValueError(f"policy_loss {kind} has no clipped ratio that a dual clip could bound")
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
        """Whether the old log-probabilities are the trainer's own."""
        if self.old_logprobs == "auto":
            return self.epochs * self.minibatches > 1 or _needs_recompute(vars(self)) is not None
        return self.old_logprobs == "recompute"

    @property
    def scores_actor(self) -> bool:
        """Whether that takes a pass of its own: a single optimizer step begins with the weights it compares with."""
        return self.recomputes and self.epochs * self.minibatches > 1


def _needs_recompute(settings: Mapping[str, Any]) -> str | None:
    kind = getattr(settings.get("correction"), "kind", "none")
    if kind != "none":
        return f"correction {kind}"
    return "policy_loss gspo" if settings.get("policy_loss") == "gspo" else None


class PolicyGradient(Learner):
    """Base of the learners that weigh sampled tokens by an advantage. A subclass says what the advantages are."""

    Config: ClassVar[type[LearnerConfig]] = PolicyGradientConfig
    config: PolicyGradientConfig

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
    def step_advantages(self, group: Sequence[TimeLine]) -> list[Steps]:
        """[n] advantages of each episode of a group, one for each of its time steps."""

    def prepare(self, groups: Sequence[Group]) -> list[LearnRow]:
        kept: list[list[TimeLine]] = []
        n_episodes = 0
        for group in groups:
            episodes = [episode for episode in group.episodes if episode.reward is not None]
            if len(episodes) < self.min_group_size:
                continue  # members failed: there is nothing left to compare with
            lines = [self._time_line(e, n_episodes + i, len(kept)) for i, e in enumerate(episodes)]
            n_episodes += len(lines)
            kept.append(lines)
        found = [self.step_advantages(lines) for lines in kept]
        still = []
        if self.min_group_size > 1:  # others have no baseline by which equal rewards would say nothing
            by_turn = self.config.credit == "turn"
            for lines, own in zip(kept, found, strict=True):
                still.append(without_variance(own, [line.ends if by_turn else [len(line)] for line in lines]))
        advantages = normalised(found, self.config.advantage_norm, still)
        for lines, of_group in zip(kept, advantages, strict=True):
            for line, of_episode in zip(lines, of_group, strict=True):
                line.write("advantages", of_episode)
                self._finish(line.rows)
        return [row for lines in kept for line in lines for row in line.rows]

    def _time_line(self, episode: Episode, index: int, group: int) -> TimeLine:
        rows = [LearnRow.of(row, episode=index, unit=index) for row in episode.rows]
        for row in rows:
            row.group = group
            if self.config.shaping.overlong_filter and episode.outcome.status is Status.TRUNCATED:
                row.weights[:] = 0.0
        return TimeLine.of(episode, rows, shaped_reward(episode, self.config.shaping))

    @property
    def pays_kl(self) -> bool:
        """Whether the KL is part of the reward."""
        return self.config.kl.place != "loss" and self.config.kl.coef != 0

    def kl_rewards(self, line: TimeLine) -> Steps:
        """[n] What each action token pays for its KL: 0 where that is no part of the reward."""
        import numpy as np

        if not self.pays_kl:
            return np.zeros(len(line))
        import torch

        old = torch.from_numpy(line.read("actor" if self.config.scores_actor else "old_logprobs"))
        reference = torch.from_numpy(line.read("reference"))
        paid = -self.kl_coef * kl_estimate(old, reference, self.config.kl.estimator)
        if self.config.correction.drops:  # what is not a number there is dropped, and must not reach other tokens
            paid = torch.where(old.isfinite(), paid, 0.0)
        steps: Steps = paid.numpy()
        return steps

    def _finish(self, rows: Sequence[LearnRow]) -> None:
        """Make an episode's rows what the loss reads."""
        import numpy as np

        total = sum(float(row.weights.sum()) for row in rows)
        for row in rows:
            if self.config.kl.target is not None and self.config.kl.place == "loss":
                row.arrays["kl_coef"] = np.full(len(row.token_ids), self.kl_coef, np.float32)
            if self.config.aggregation == "sequence" and total > 0:
                row.weights = row.weights / np.float32(total)  # one episode counts once, however many rows it has

    def denominators(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        totals = super().denominators(rows)
        own: str = Objective.POLICY_GRADIENT
        if self.config.aggregation != "token" and own in totals:
            n_episodes = len({row.episode for row in rows if row.objective == own})
            totals[own] = float(
                n_episodes * (self.config.constant_length if self.config.aggregation == "constant" else 1)
            )
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
        """The policy's loss of policy-gradient rows, with entropy bonus and KL where these are asked for."""
        import torch

        kept, factors, metrics = self._corrected(outputs, batch)

        def only(values: torch.Tensor) -> torch.Tensor:
            # `where`, not a product with the mask: a NaN or infinity at a masked or dropped place must reach neither
            # the loss nor, through a derivative there, the gradient.
            return torch.where(kept, values, 0.0)

        logprobs, old = only(outputs.logprobs), only(self._old(outputs, batch))
        log_ratio = logprobs - old
        if self.config.policy_loss == "gspo":
            log_ratio = sequence_log_ratio(log_ratio, logprobs, only(batch.weights), batch.episodes)
        losses, low, high = self._surrogate(log_ratio, logprobs, only(batch.arrays["advantages"]))
        losses = factors * losses
        entropy = only(outputs.entropy)
        means = {"policy/entropy": entropy, "policy/clip_fraction_low": low, "policy/clip_fraction_high": high}
        if self.config.entropy_coef > 0:
            losses = losses - self.config.entropy_coef * entropy
        if self.config.kl.coef > 0:
            kl = kl_estimate(logprobs, only(batch.arrays["reference"]), self.config.kl.estimator)
            means["policy/kl"] = kl
            if self.config.kl.place == "loss":
                adaptive = "kl_coef" in batch.arrays
                losses = losses + (only(batch.arrays["kl_coef"]) if adaptive else self.config.kl.coef) * kl
        total = (batch.weights * losses).sum()
        summed, weight = torch.stack([total.detach(), batch.weights.sum()]).tolist()
        metrics |= token_metrics(means, log_ratio, kept) | {"loss": (summed, weight)}
        return total / denominators[batch.objective], metrics

    def _surrogate(self, log_ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor) -> Loss:
        config = self.config
        if config.policy_loss == "cispo":
            return cispo_loss(log_ratio, logprobs, advantages, config.clip_low, config.clip_high)
        if config.policy_loss == "reinforce":
            return reinforce_loss(logprobs, advantages)
        return clipped_policy_loss(log_ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)

    def _old(self, outputs: Outputs, batch: RowBatch) -> torch.Tensor:
        if not self.config.recomputes:
            return batch.old_logprobs
        # A single optimizer step begins with the old policy's weights, so its own forward pass says it.
        return batch.arrays["actor"] if self.config.scores_actor else outputs.logprobs.detach()

    def _corrected(self, outputs: Outputs, batch: RowBatch) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """[B, T] which tokens are learned from, what their policy loss is multiplied by, and what to log of that."""
        import torch

        counts = batch.weights > 0
        if self.config.correction.kind == "none":
            return counts, torch.ones_like(batch.weights), {}
        factors, kept = correction(
            self._old(outputs, batch), batch.old_logprobs, batch.weights, batch.episodes, self.config.correction
        )
        n_counted, n_kept, total = torch.stack([counts.sum(), kept.sum(), factors.sum()]).tolist()
        dropped = (n_counted - n_kept, n_counted)
        return kept, factors, {"correction/weight": (total, n_kept), "correction/dropped_share": dropped}

    def pretraining_loss(
        self, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """`pretrain_coef` times the cross-entropy of text that is taught as it stands, a mean over its tokens.

        Source: the PPO-ptx objective of L. Ouyang et al., "Training language models to follow instructions with human
        feedback" (2022), eq. 2.
        """
        import torch

        nll = torch.where(batch.weights > 0, -batch.weights * outputs.logprobs, 0.0).sum()
        metrics = {"pretrain/loss": (float(nll.detach()), float(batch.weights.sum()))}
        return self.config.pretrain_coef * nll / denominators[batch.objective], metrics

    # -- what is told and what adapts ---------------------------------------------------------------------

    def metrics(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        rows = [row for row in rows if row.objective == Objective.POLICY_GRADIENT]
        told = advantage_metrics(rows) | {"learner/episodes": float(len({row.episode for row in rows}))}
        return told | ({"policy/kl_coef": self.kl_coef} if self.config.kl.coef > 0 else {})

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
