"""Settings of the policy-gradient learners. Nothing heavy is imported here: settings are validated, and their keys
suggested, where torch is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from envgym.learner import LearnerConfig
from envgym.settings import Settings

Bound = Annotated[float, Field(allow_inf_nan=True)]
Credit = Literal["episode", "turn"]
Scope = Literal["batch", "batch_mean", "group", "none"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["reward", "loss"]
PolicyLoss = Literal["ppo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]
CorrectionKind = Literal["none", "tis", "icepop", "seq_mask_tis"]


class ShapingConfig(Settings):
    """Changes of the raw reward, in this order: overlong penalty, stop-properly penalty, clip."""

    clip: tuple[Bound, Bound] | None = None
    """Bounds of the raw reward, before members of a group are compared; `[0, .inf]` has a lower one alone."""
    overlong_length: int | None = Field(None, ge=1)
    """Sampled tokens of an episode at which the penalty for length is whole (DAPO's soft overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1, validate_default=True)
    """Tokens before that, over which the penalty rises linearly from 0."""
    overlong_factor: float = Field(1.0, ge=0)
    """The whole penalty."""
    stop_properly: float | None = Field(None, le=1)
    """Share of its reward that a truncated episode keeps (ProRL): from 0 to 1; below 0 that number instead of the
    reward. Unset: all of it."""
    overlong_filter: bool = False
    """Do not train on truncated episodes; the others are still compared with them."""

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
    """Penalty for moving away from the reference model."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model. 0 builds no reference model."""
    estimator: KLEstimator = "k3"
    """Estimate of the KL from the sampled tokens: `k1` log-ratio, `k2` half its square, `k3` never negative and of
    low variance. In the loss `k1` has no gradient on average; `k2` has the KL's own."""
    place: KLPlace = "loss"
    """`reward`: every action token pays `coef` times its KL at the start of the update; `loss`: a term of the loss."""
    target: float | None = Field(None, gt=0)
    """The KL, in nats a token, that the coefficient is adapted to keep; unset: it stays as it is."""
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
    place: KLPlace = "reward"


class SquaredKL(KLConfig):
    """The KL as half the squared log-ratio in the loss, by default: its gradient is the KL's own."""

    estimator: KLEstimator = "k2"


class CorrectionConfig(Settings):
    """Weights w = pi_trainer / pi_sampler on the policy loss, at the start of the update."""

    kind: CorrectionKind = "none"
    """`tis`: w, at most `high`; `icepop`: w, and tokens with w outside [low, high] are dropped; `seq_mask_tis`: as
    `tis`, and episodes whose geometric mean of w is outside are dropped."""
    low: float = Field(0.5, ge=0)
    """Smallest w."""
    high: float = Field(5.0, gt=0, validate_default=True)
    """Largest w."""

    @property
    def drops(self) -> bool:
        """It may leave tokens out."""
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
    """`episode`: the reward counts for all of an episode's tokens; `turn`: a turn's reward counts for the tokens up
    to it."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount from one action token to the next. Feedback takes no time."""
    advantage_norm: Scope = "none"
    """Advantages are brought to mean 0 and standard deviation 1 over the tokens of the whole rollout (`batch`) or of
    each group by itself, to mean 0 alone over those of the rollout (`batch_mean`), or stay as they are."""
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
    """The old policy of the ratio: `rollout` the sampler's, `recompute` the trainer's at the start of the
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
        """The old log-probabilities are the trainer's own."""
        if self.old_logprobs == "auto":
            return self.epochs * self.minibatches > 1 or _needs_recompute(vars(self)) is not None
        return self.old_logprobs == "recompute"

    @property
    def scores_actor(self) -> bool:
        """That takes a pass of its own: a single optimizer step begins with the weights it compares with."""
        return self.recomputes and self.epochs * self.minibatches > 1


def _needs_recompute(settings: Mapping[str, Any]) -> str | None:
    kind = getattr(settings.get("correction"), "kind", "none")
    if kind != "none":
        return f"correction {kind}"
    return "policy_loss gspo" if settings.get("policy_loss") == "gspo" else None


class DPOConfig(LearnerConfig):
    """Settings of DPO."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference model: the smaller, the further the policy may move."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: DPO's logistic loss; `ipo`: a squared one, which does not push sure preferences ever further apart."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of the pairs that are taken to be labelled the wrong way round (cDPO)."""
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the cross-entropy of the chosen answers, a mean over their tokens."""

    @field_validator("label_smoothing")
    @classmethod
    def _is_the_sigmoids(cls, smoothing: float, info: ValidationInfo) -> float:
        if smoothing and info.data.get("loss") == "ipo":
            raise ValueError("label_smoothing is for loss=sigmoid: IPO's loss is not sure of its labels anyway")
        return smoothing


class KTOConfig(LearnerConfig):
    """Settings of KTO."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference model, and how soon an answer is good or bad enough."""
    desirable: float = Field(1.0, ge=0)
    """Weight of good answers. With the other: such that good and bad count about the same in all."""
    undesirable: float = Field(1.0, ge=0)
    """Weight of bad answers."""


class RewardModelConfig(LearnerConfig):
    """Settings of a reward model."""

    margin: bool = False
    """The chosen answer's reward is to be higher by the pair's `margin`, a field of the data."""


class SFTConfig(LearnerConfig):
    """Settings of supervised fine-tuning."""

    select: Literal["all", "best"] = "all"
    """Episodes of each task that are taught: all of them, or the one of the highest reward (rejection sampling)."""


class DistillConfig(SFTConfig):
    """Settings of distillation."""

    kd_coef: float = Field(0.4, ge=0, le=1)
    """Weight of the divergence from the teacher; the rest is the cross-entropy of the answers."""
    top_k: int = Field(64, ge=1)
    """The teacher's likeliest tokens that are compared one by one; all others together count as one more."""
