"""What a learner is: it declares the models it needs, turns groups of episodes into rows, and has a loss.

`prepare` and `denominators` run in the controller on plain arrays; `loss` runs in the worker that holds the
model. All three are pure (but for a coefficient that `observe` may move between two steps), so a learner is tested
without a trainer, and the trainer knows none by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from .settings import Settings
from .types import Group, Objective, Row

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]
    IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model the learner needs. `head` `lm` gives log-probabilities of the tokens, `scalar` one value a token.

    A role that is not `trained` only scores rows before `prepare`: its [T] numbers arrive as
    `row.outputs[role]`. So do those of a trained role with `scored=True` (a critic's values). A role that is not
    trained and has no model of its own in the settings is the policy as the stage found it.

    `idle_steps`: loop steps at the start of the stage in which a trained role is not trained yet.
    `entropy`: the loss differentiates the policy's entropy; else it is only there to be logged.
    """

    trained: bool = False
    scored: bool = True
    head: Literal["lm", "scalar"] = "lm"
    idle_steps: int = 0
    entropy: bool = False


@dataclass(slots=True)
class LearnRow:
    """One sequence, ready for a worker.

    token_ids    [T] int64
    weights      [T] float32, how much token t counts (predicted from the tokens before it); weights[0] is 0
    old_logprobs [T] float32 nats, log-probabilities as sampled; NaN where nothing was sampled
    arrays       name -> [T] float32, what the learner's loss reads (advantages, reference log-probabilities)
    temperatures [T] float32, what each action token was sampled at; None: all at 1
    unit         rows of one unit (a pair, a group) stay in one micro-batch
    episode      index of the episode within the batch, for aggregation by episode
    group        index of its group within the batch, for what is told of groups
    versions     the policy versions that sampled its actions
    current      whether all of them come from the weights about to be trained
    """

    token_ids: IntArray
    weights: FloatArray
    old_logprobs: FloatArray
    objective: Objective
    arrays: dict[str, FloatArray] = field(default_factory=dict)
    temperatures: FloatArray | None = None
    unit: int = 0
    episode: int = 0
    group: int = 0
    versions: tuple[int, ...] = ()
    current: bool = True

    @classmethod
    def of(cls, row: Row, *, episode: int = 0, unit: int = 0) -> LearnRow:
        """The arrays of an episode's row, with what scoring roles said of it under their names."""
        import numpy as np

        weights = np.asarray(row.weights, np.float32)
        weights[0] = 0.0  # nothing predicts the first token
        return cls(
            token_ids=np.asarray(row.token_ids, np.int64),
            weights=weights,
            old_logprobs=np.asarray(row.logprobs, np.float32),
            objective=row.objective,
            arrays={role: np.asarray(values, np.float32) for role, values in row.outputs.items()},
            temperatures=np.asarray(row.temperatures, np.float32),
            unit=unit,
            episode=episode,
            versions=tuple(sorted({span.version for segment in row.segments for span in segment.versions})),
        )


@dataclass(slots=True)
class RowBatch:
    """A padded micro-batch of rows of one objective, as tensors in the worker. B rows, T tokens.

    token_ids [B, T]; weights, old_logprobs and every entry of arrays [B, T]. Padding has weight 0.
    `episodes` [B] are the rows' episode indexes.
    """

    objective: Objective
    token_ids: torch.Tensor
    weights: torch.Tensor
    old_logprobs: torch.Tensor
    arrays: dict[str, torch.Tensor]
    episodes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a model says of a micro-batch, float32 [B, T] each. A head fills in its own; the others are None.

    logprobs `lm`: log-probabilities of token t given those before it, in nats, at the temperature it was sampled at;
             0 at t = 0 and wherever nothing counts or was sampled
    entropy  `lm`: of the distribution that token t was drawn from, in nats, likewise
    values   `scalar`: one value a token, from the tokens up to and with t
    """

    logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    values: torch.Tensor = None


Metrics = dict[str, tuple[float, float]]
"""name -> (numerator, denominator); summed over micro-batches and ranks, then divided. Names that end in
`/max` or `/min` hold (value, 1), and the largest or the smallest is kept."""


class LearnerConfig(Settings):
    """Settings every learner has. A learner's own `Config` subclasses this and adds its own."""

    name: str
    """Id, file path (`file.py:Name`) or import path of the learner."""
    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up: stay, or fall to `lr_min_ratio` of the peak by the end of the run."""
    lr_min_ratio: float = Field(0.1, ge=0, le=1)
    """The share of the peak learning rate that a falling schedule ends at."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    """The same as a share of the run's optimizer steps, rounded up. Give one of the two."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (K. Jordan, 2024) takes steps of orthogonalised momentum for the matrices inside the layers; embeddings,
    heads and vectors stay with AdamW. It does not clip: orthogonalising leaves nothing of a gradient's length."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    muon_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the matrices that Muon steers, on the same schedule; by default `lr`. The step is about
    this long in every direction of a matrix, so that it is larger than AdamW's: 1e-3, say."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum (Nesterov's)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps one rollout is cut into (by units, in order)."""
    epochs: int = Field(1, ge=1)
    """Times one rollout is trained on."""
    freeze: list[str] = Field([])
    """Regular expressions: parameters in whose name one is found keep their values (`[embed_tokens, visual]`)."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Keep a float32 moving average of the policy's weights, `decay * average + (1 - decay) * weights` after each
    optimizer step, and leave it in the run folder as `model_ema/`. 0: none."""

    moe_aux_coef: float = Field(0.0, ge=0)
    """Weight of the loss that keeps the experts of a mixture of experts equally busy (Switch Transformer, 2021); it is
    added to the learner's own. A usual value is 0.001."""

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
            raise ValueError("warmup_steps and warmup_ratio say the same thing: give one of them")
        if self.muon_lr is not None and self.optimizer != "muon":
            raise ValueError("muon_lr is for optimizer=muon")
        if self.muon_lr is not None and self.lr == 0:
            raise ValueError("muon_lr follows the schedule of lr, which is 0")
        return self


class Learner(ABC):
    """Subclass, set `Config` and `roles`, write `prepare` and `loss`. Nothing here may import torch at the top."""

    Config: ClassVar[type[LearnerConfig]] = LearnerConfig

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """The models this learner needs, by role. `actor` is the policy."""
        return {"actor": RoleSpec(trained=True, scored=False)}

    min_group_size: ClassVar[int] = 1
    """Episodes of one task a group must have to be learned from."""

    @abstractmethod
    def prepare(self, groups: Sequence[Group]) -> list[LearnRow]:
        """Rows to train on, with the numbers the loss reads. Failed episodes are not among `groups`' members."""

    def denominators(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        """What each objective's sum is divided by, over one whole optimizer step (all ranks, all micro-batches).

        By default the total weight: a mean over tokens.
        """
        totals: dict[str, float] = {}
        for row in rows:
            totals[row.objective] = totals.get(row.objective, 0.0) + float(row.weights.sum())
        return {name: max(total, 1e-8) for name, total in totals.items()}

    @abstractmethod
    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """The micro-batch's share of the step's loss (a scalar) and what to log."""

    def metrics(self, rows: Sequence[LearnRow]) -> dict[str, float]:
        """What to log of the rows that `prepare` made: numbers about the whole step, before it is learned from."""
        return {}

    def observe(self, record: Mapping[str, Any]) -> None:
        """Told what a loop step logged, once it has been learned from: where a coefficient follows a measurement."""

    def state(self) -> dict[str, Any]:
        """What `observe` has changed, for a checkpoint: numbers, text, lists, tuples and mappings of them."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    def evaluate(self, rows: Sequence[LearnRow], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Numbers about held-out recorded rows from the actor's log-probabilities of them ([T] each)."""
        return {}
