"""A learner: the models it needs, the arrays its loss reads, and the loss.

`prepare` and `loss_normalizers` run in the controller on the arrays of rows; `loss` runs in the worker that holds the
model. They depend only on their arguments (and on coefficients that `end_step` may adapt between two steps), so a
learner is tested without a trainer, and the trainer knows no learner by name.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from .errors import RunError
from .settings import Settings
from .types import Group, Objective, Row

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .types.episodes import FloatArray


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model the learner needs. Head `lm` gives log-probabilities of the tokens, `scalar` one value per token.

    A role that is not `trained` only runs a forward pass over the rows before `prepare`: its outputs [T] arrive as
    `row.arrays[role]`. So do those of a trained role with `scored=True` (a critic's values). An untrained role
    without a model in the settings is a frozen copy of the policy at the start of the stage.

    `frozen_steps`: number of training steps at the start of the stage in which a trained role is not trained yet.
    `entropy`: the loss differentiates the policy's entropy; otherwise the entropy is only logged.
    `top_k`: an untrained role returns the k most likely tokens at each position, [T, k, 2]: their log-probabilities in
    nats, and their ids.
    `needs_model`: the settings must name the role's model.
    `extra_token_ids`: name of an array [T, K] of token ids whose log-probabilities a trained role's loss also reads.
    """

    trained: bool = False
    scored: bool = True
    head: Literal["lm", "scalar"] = "lm"
    frozen_steps: int = 0
    entropy: bool = False
    top_k: int = 0
    needs_model: bool = False
    extra_token_ids: str = ""


@dataclass(slots=True)
class RowBatch:
    """A padded micro-batch of rows of one objective, as tensors in the worker. B rows, T tokens.

    token_ids [B, T] int64; loss_weights and old_logprobs [B, T], every entry of arrays [B, T] or [B, T, …], float32.
    Padding has weight 0.
    `episodes` [B] are the rows' episode indexes, `units` [B] their micro-batch keys.
    """

    objective: Objective
    token_ids: torch.Tensor
    loss_weights: torch.Tensor
    old_logprobs: torch.Tensor
    arrays: dict[str, torch.Tensor]
    episodes: torch.Tensor
    units: torch.Tensor

    def weighted_sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` [B, T] times the loss weights, over the tokens of positive weight. At others `values`
        may be NaN."""
        return (self.loss_weights * values).where(self.loss_weights > 0, 0.0).sum()

    def unit_sums(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """[units] the sum of `values` [B, T] over each unit's tokens of positive weight, in all rows or those that
        `rows` [B] marks; units in the order of their keys."""
        row_sums = values.where(self.loss_weights > 0, 0.0).sum(1)
        if rows is not None:
            row_sums = row_sums.where(rows, 0.0)
        units, index = self.units.unique(return_inverse=True)
        return row_sums.new_zeros(len(units)).index_add(0, index, row_sums)


def pad(rows: Sequence[Row], device: torch.device, length: int | None = None) -> RowBatch:
    """Pad rows of one objective on the right into tensors [B, T]; T is `length` or the longest row's.

    Padding is 0, but NaN in `old_logprobs`.
    """
    import numpy as np
    import torch

    length = length or max([len(row.token_ids) for row in rows])

    def stack(arrays: Sequence[NDArray[Any]], fill: float, dtype: type) -> torch.Tensor:
        padded: NDArray[Any] = np.full((len(rows), length, *arrays[0].shape[1:]), fill, dtype)
        for line, array in zip(padded, arrays, strict=True):
            line[: len(array)] = array
        return torch.from_numpy(padded).to(device)

    return RowBatch(
        objective=rows[0].objective,
        token_ids=stack([row.token_ids for row in rows], 0, np.int64),
        loss_weights=stack([row.loss_weights for row in rows], 0, np.float32),
        old_logprobs=stack([row.old_logprobs for row in rows], np.nan, np.float32),
        arrays={name: stack([row.arrays[name] for row in rows], 0, np.float32) for name in rows[0].arrays},
        episodes=torch.tensor([row.episode_index for row in rows], device=device),
        units=torch.tensor([row.microbatch_key for row in rows], device=device),
    )


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a model for a micro-batch, float32 [B, T] each. The fields of the other head are None.

    logprobs       `lm`: log-probability of token t given the tokens before it, in nats, at its sampling temperature;
                   0 at t = 0 and at tokens that neither have a weight nor were sampled
    entropy        `lm`: entropy of the distribution of token t, in nats, for the same tokens
    extra_logprobs `lm`: [B, T, K] log-probabilities at position t of the tokens in the role's `extra_token_ids` array
    values         `scalar`: one value per token, from the tokens up to and including t
    """

    logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    extra_logprobs: torch.Tensor = None
    values: torch.Tensor = None


MetricSums = dict[str, tuple[float, float]]
"""name -> (numerator, denominator); summed over micro-batches and ranks, then divided. Names that end in `/max` or
`/min` hold (value, 1) and are combined by max or min instead."""
LossAndMetrics = tuple["torch.Tensor", MetricSums]
"""A loss, summed over the batch or divided by its normalizer, and metrics to log."""


class OptimizerConfig(Settings):
    """Settings of an optimizer, which a role may have other ones of than the learner."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up: constant, or decayed to `lr_min_ratio` of the peak by the end of the run."""
    lr_min_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate of a decaying schedule, as a share of the peak."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    """`warmup_steps` as a share of the run's optimizer steps, rounded up. Set one of the two."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (K. Jordan, 2024) takes steps of orthogonalised momentum for the matrices inside the layers; embeddings,
    heads and vectors stay with AdamW. It does not clip: orthogonalising discards the gradient's norm."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    muon_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the matrices that Muon trains, on the same schedule; by default `lr`. An update has about
    this length in every direction of a matrix, so use a larger value than for AdamW, such as 1e-3."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum (Nesterov's)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class LearnerConfig(OptimizerConfig):
    """Settings of every learner. A learner's `Config` subclasses this and adds its own."""

    name: str
    """Id, file path (`file.py:Name`) or import path of the learner."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps that one rollout is split into (by units, in order)."""
    update_epochs: int = Field(1, ge=1)
    """Times one rollout is trained on."""
    freeze: list[str] = Field([])
    """Regular expressions: parameters whose names match one are not trained (`[embed_tokens, visual]`)."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Maintain a float32 moving average of the policy's weights, `decay * average + (1 - decay) * weights` after each
    optimizer step, and save it in the run folder as `model_ema/`. 0: none."""

    neftune_alpha: float = Field(0.0, ge=0)
    """Noise on the token embeddings during training (N. Jain et al., "NEFTune", 2023): uniform, of at most this divided
    by the square root of the sequence length times the embedding width. 5 is usual for SFT."""
    moe_aux_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss for a mixture of experts (Switch Transformer, 2021), which is added to the
    learner's loss. A usual value is 0.001."""

    @field_validator("freeze")
    @classmethod
    def _regular_expressions(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @model_validator(mode="after")
    def _optimizer_settings_agree(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both set the warm-up: set one of them")
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ValueError("muon_lr is for optimizer=muon")
        if self.muon_lr is not None and self.lr == 0:
            raise ValueError("muon_lr follows the schedule of lr, which is 0")
        return self


class Learner(ABC):
    """Subclass, set `Config` and `roles`, write `prepare` and `loss`. Nothing here may import torch at the top.

    The types in these signatures are in `envgym.learner` and `envgym.types`.
    """

    Config: ClassVar[type[LearnerConfig]] = LearnerConfig

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """The models this learner needs, by role. `actor` is the policy."""
        return {"actor": RoleSpec(trained=True, scored=False)}

    @staticmethod
    def wrong_return(method: Callable[..., Any], returned: str) -> RunError:
        """The error for a wrong return value (`returned` describes it), with the method's file and line."""
        code = inspect.unwrap(method).__code__
        return RunError(f"{code.co_filename}, line {code.co_firstlineno}: {code.co_qualname} returned {returned}")

    min_group_size: ClassVar[int] = 1
    """Minimum number of episodes in a group that is trained on."""
    needs_policy_samples: ClassVar[bool] = False
    """True if the learner trains only on episodes that the policy sampled, not on recordings."""

    def rows_to_score(self, groups: Sequence[Group]) -> list[Row]:
        """The rows that scoring roles see, before `prepare`: those of the episodes, and others that a learner makes."""
        return [row for group in groups for episode in group.episodes for row in episode.rows]

    @abstractmethod
    def prepare(self, groups: Sequence[Group]) -> list[Row]:
        """The rows to train on, with the inputs of the loss in their `arrays`. Groups hold no failed episodes. Change
        a row's objective in a copy (`Row.copy_with`): the episode may still be in writing."""

    def loss_normalizers(self, rows: Sequence[Row]) -> dict[str, float]:
        """Divisor of each objective's loss sum, over one optimizer step (all ranks, all micro-batches).

        By default the total loss weight: a mean over tokens.
        """
        totals: dict[str, float] = {}
        for row in rows:
            totals[row.objective] = totals.get(row.objective, 0.0) + float(row.loss_weights.sum())
        return {name: max(total, 1e-8) for name, total in totals.items()}

    skips_truncated: bool = False
    """True if truncated episodes are not trained on."""
    returns: Mapping[int, float] | None = None
    """The returns that the last `prepare` computed advantages from, by the episode's index; None for a learner that has
    none, or changes the rewards by its settings."""

    def token_shares(self, objective: Objective, weights: Mapping[int, float]) -> Mapping[int, float] | None:
        """The share of a token of weight 1 in an objective's loss of an optimizer step, by the index of its episode:
        what the settings say, for `envgym.monitoring.laws`, without `loss_normalizers`. `weights`: the weight of each
        episode's tokens. None if the loss is no sum of log-probabilities (in a policy gradient, times advantages) times
        such shares."""
        return None

    @abstractmethod
    def loss(self, role: str, outputs: Outputs, batch: RowBatch, normalizers: Mapping[str, float]) -> LossAndMetrics:
        """The micro-batch's share of the optimizer step's loss (a scalar), and metrics to log."""

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """Metrics of the rows that `prepare` returned, over the whole training step, before any update."""
        return {}

    def end_step(self, rows: Sequence[Row]) -> None:
        """Called after each training step with the rows that it trained on, which have the outputs of the policy's
        model if that was trained (`Row.first_outputs`); override to adapt coefficients such as the KL's."""

    def state_dict(self) -> dict[str, Any]:
        """State that `end_step` changes, for a checkpoint: numbers, text, lists, and mappings with keys of text."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""

    def model_config_extras(self) -> Mapping[str, Any]:
        """Extra entries for `config.json` of the saved policy model, such as a reward model's reward statistics."""
        return {}

    def evaluate(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Metrics of held-out recorded rows from the actor's outputs for them ([T] each)."""
        return {}

    def loss_metrics(self, rows: Sequence[Row], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """The metrics that `loss` logs for rows of one objective, from the actor's outputs for them ([T] each), for
        `evaluate`. A loss that reads other outputs has none."""
        import torch

        scored = [
            row.copy_with(arrays=row.arrays | {"outputs": output}) for row, output in zip(rows, outputs, strict=True)
        ]
        batch = pad(scored, torch.device("cpu"))
        numbers = Outputs(**{"logprobs" if self.roles["actor"].head == "lm" else "values": batch.arrays["outputs"]})
        _, sums = self.loss("actor", numbers, batch, self.loss_normalizers(rows))
        return {name: total / count for name, (total, count) in sums.items() if count}
