"""Settings of the policy-gradient learners. Nothing heavy is imported here: settings are validated, and their keys
suggested, where torch is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.learner import LearnerConfig
from envgym.settings import Settings

from .policy_losses import policy_loss_of

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
