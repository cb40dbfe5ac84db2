"""A learner: it declares the models it needs, gives samples what its loss reads, and has a loss.

`prepare` and `denominators` run in the controller on plain arrays; `loss` runs in the worker that holds the
model. They depend on nothing but their arguments (and a coefficient that `observe` may move between two steps), so a
learner is tested without a trainer, and the trainer knows none by name.
"""

from __future__ import annotations

import inspect
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from .errors import RunError
from .settings import Settings
from .types import Episode, Group, Objective, Row

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]
    IntArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model the learner needs. `head` `lm` gives log-probabilities of the tokens, `scalar` one value a token.

    A role that is not `trained` only scores samples before `prepare`: its [T] numbers arrive as
    `sample.arrays[role]`. So do those of a trained role with `scored=True` (a critic's values). A role that is not
    trained and has no model of its own in the settings is the policy as the stage found it.

    `idle_steps`: loop steps at the start of the stage in which a trained role is not trained yet.
    `entropy`: the loss differentiates the policy's entropy; else it is only there to be logged.
    `top_k`: a role that is not trained scores with the k likeliest tokens, [T, k, 2]: their log-probabilities in the
    place of each token, in nats, and their ids.
    `needs_model`: its model must be named in the settings.
    `compared`: name of an array [T, K] of token ids, whose log-probabilities the loss of a trained role reads too.
    """

    trained: bool = False
    scored: bool = True
    head: Literal["lm", "scalar"] = "lm"
    idle_steps: int = 0
    entropy: bool = False
    top_k: int = 0
    needs_model: bool = False
    compared: str = ""


@dataclass(slots=True)
class TrainSample:
    """One token sequence of length T, as scoring roles, learners and workers see it. Made once (`trajectories`).

    token_ids    [T] int
    loss_weights [T] float32, how much token t counts (predicted from the tokens before it); loss_weights[0] is 0
    old_logprobs [T] float32 nats, log-probabilities as sampled; NaN where nothing was sampled
    arrays       name -> [T] or [T, …] float32: what scoring roles say, by role; what the learner's loss reads
    temperatures [T] float32, what each action token was sampled at; None: all at 1
    batch_unit   samples of one unit (a pair, a group) stay in one micro-batch
    episode      index of the episode within the step, for aggregation by episode
    group        index of its group within the step, for metrics of groups
    versions     the policy versions that sampled its actions
    current      whether all of them come from the weights about to be trained
    """

    token_ids: IntArray
    loss_weights: FloatArray
    old_logprobs: FloatArray
    objective: Objective
    arrays: dict[str, FloatArray] = field(default_factory=dict)
    temperatures: FloatArray | None = None
    batch_unit: int = 0
    episode: int = 0
    group: int = 0
    versions: tuple[int, ...] = ()
    current: bool = True

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, row: Row, *, episode: int = 0, group: int = 0) -> TrainSample:
        """The arrays of an episode's row, which is a batch unit with the episode's other rows."""
        import numpy as np

        segments = row.segments
        lengths = [len(segment) for segment in segments]
        weights = np.concatenate([np.asarray(segment.loss_weights, np.float32) for segment in segments])
        weights[0] = 0.0  # nothing predicts the first token
        logprobs = [
            np.full(length, np.nan, np.float32)
            if segment.logprobs is None
            else np.asarray(segment.logprobs, np.float32)
            for segment, length in zip(segments, lengths, strict=True)
        ]
        return cls(
            token_ids=np.concatenate([np.asarray(segment.token_ids, np.int32) for segment in segments]),
            loss_weights=weights,
            old_logprobs=np.concatenate(logprobs),
            objective=row.objective,
            temperatures=np.repeat(np.array([segment.temperature for segment in segments], np.float32), lengths),
            batch_unit=episode,
            episode=episode,
            group=group,
            versions=tuple(sorted({span.version for segment in segments for span in segment.versions})),
        )

    def unsample(self) -> None:
        """Forget that the tokens were sampled at other temperatures than 1: they count as data, likely as the model
        itself has it."""
        import numpy as np

        if self.temperatures is not None and (self.temperatures != 1).any():
            self.temperatures, self.old_logprobs = None, np.full_like(self.old_logprobs, np.nan)


@dataclass(slots=True)
class Trajectory:
    """An episode, its rows as samples to train on, and what else a learner has scored beside them (`to_score`)."""

    episode: Episode
    samples: list[TrainSample]
    extra: list[TrainSample] = field(default_factory=list)


def trajectories(groups: Sequence[Group]) -> list[list[Trajectory]]:
    """The episodes of each group with their samples; episodes and groups are numbered in order."""
    numbers = itertools.count()

    def trajectory(episode: Episode, group: int) -> Trajectory:
        number = next(numbers)
        return Trajectory(episode, [TrainSample.of(row, episode=number, group=group) for row in episode.rows])

    return [[trajectory(episode, index) for episode in group.episodes] for index, group in enumerate(groups)]


@dataclass(slots=True)
class RowBatch:
    """A padded micro-batch of rows of one objective, as tensors in the worker. B rows, T tokens.

    token_ids [B, T] int64; loss_weights and old_logprobs [B, T], every entry of arrays [B, T] or [B, T, …], float32.
    Padding has weight 0.
    `episodes` [B] are the rows' episode indexes, `units` [B] their batch units.
    """

    objective: Objective
    token_ids: torch.Tensor
    loss_weights: torch.Tensor
    old_logprobs: torch.Tensor
    arrays: dict[str, torch.Tensor]
    episodes: torch.Tensor
    units: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of a model for a micro-batch, float32 [B, T] each. A head fills in its own; the others are None.

    logprobs `lm`: log-probabilities of token t given those before it, in nats, at the temperature it was sampled at;
             0 at t = 0 and wherever nothing counts or was sampled
    entropy  `lm`: of the distribution that token t was drawn from, in nats, likewise
    others   `lm`: [B, T, K] log-probabilities of the tokens that the role's `compared` array names in the place of
             token t
    values   `scalar`: one value a token, from the tokens up to and with t
    """

    logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    others: torch.Tensor = None
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
    """Course of the learning rate after warm-up: stay, or fall to `lr_min_ratio` of the peak by the end of the run."""
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

    neftune_alpha: float = Field(0.0, ge=0)
    """Noise on the token embeddings while learning (N. Jain et al., "NEFTune", 2023): uniform, of at most this divided
    by the square root of the row's length times the embeddings' width. 5 is usual for SFT."""
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

    @staticmethod
    def wrong_return(method: Callable[..., Any], returned: str) -> RunError:
        """The error for a method that `returned` too much or too little: it names the line of its author's."""
        code = inspect.unwrap(method).__code__
        return RunError(f"{code.co_filename}, line {code.co_firstlineno}: {code.co_name} returned {returned}")

    min_group_size: ClassVar[int] = 1
    """Episodes of one task a group must have to be learned from."""
    needs_samples: ClassVar[bool] = False
    """True if it learns only from what the policy sampled, not from recordings."""

    def to_score(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        """The samples that scoring roles see, before `prepare`. A learner that needs more than the episodes' own puts
        them into the trajectories' `extra` here."""
        members = [trajectory for group in groups for trajectory in group]
        return [sample for member in members for sample in (*member.samples, *member.extra)]

    @abstractmethod
    def prepare(self, groups: Sequence[Sequence[Trajectory]]) -> list[TrainSample]:
        """The samples to train on, with the numbers the loss reads in their `arrays`. Failed episodes are not among
        the groups' members."""

    def denominators(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Divisor of each objective's sum, over one whole optimizer step (all ranks, all micro-batches).

        By default the total weight: a mean over tokens.
        """
        totals: dict[str, float] = {}
        for sample in samples:
            totals[sample.objective] = totals.get(sample.objective, 0.0) + float(sample.loss_weights.sum())
        return {name: max(total, 1e-8) for name, total in totals.items()}

    @abstractmethod
    def loss(
        self, role: str, outputs: Outputs, batch: RowBatch, denominators: Mapping[str, float]
    ) -> tuple[torch.Tensor, Metrics]:
        """The micro-batch's share of the step's loss (a scalar) and what to log."""

    def metrics(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Metrics of the samples that `prepare` returned: numbers about the whole step, before it is learned from."""
        return {}

    def observe(self, record: Mapping[str, Any]) -> None:
        """Take in the metrics of a loop step that has been learned from: for coefficients that follow a measurement."""

    def state(self) -> dict[str, Any]:
        """State that `observe` has changed, for a checkpoint: numbers, text, lists, tuples and mappings of them."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""

    def description(self) -> Mapping[str, Any]:
        """Entries for the config of the policy's model when it is saved, such as the statistics of its rewards."""
        return {}

    def evaluate(self, samples: Sequence[TrainSample], outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Numbers about held-out recorded samples from the actor's log-probabilities of them ([T] each)."""
        return {}
