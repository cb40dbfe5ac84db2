"""The record of an episode: rows and segments of tokens to train on, outcomes, groups."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from .messages import Message, StopReason, Task, int_array


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of a generation were sampled with policy weights `version`."""

    version: int
    start: int
    end: int


Role = Literal["prompt", "action", "feedback"]


def float_array(values: Iterable[float]) -> array[float]:
    """Log-probabilities or weights as a float32 array: `values` itself where it is one."""
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


@dataclass(slots=True)
class Segment:
    """A run of tokens with one author.

    `token_ids` [T]; `loss_weights` [T]: how much each token counts in the row's objective (by default 1 on actions,
    0 elsewhere). Actions that were sampled carry `logprobs` [T], in nats, of the distribution they were
    sampled from, its `temperature`, and the policy `versions` that sampled them.

    Any iterables may be given; they are kept as arrays, int32 and float32, which numpy reads without copying.
    `len` is T.
    """

    role: Role
    token_ids: array[int]
    loss_weights: array[float] = field(default_factory=lambda: array("f"))
    logprobs: array[float] | None = None
    versions: tuple[VersionSpan, ...] = ()
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.token_ids = int_array(self.token_ids)
        self.loss_weights = float_array(self.loss_weights)
        if not self.loss_weights:
            self.loss_weights = array("f", (1.0 if self.role == "action" else 0.0,)) * len(self.token_ids)
        if len(self.loss_weights) != len(self.token_ids):
            raise ValueError(f"{len(self.loss_weights)} weights for {len(self.token_ids)} tokens")
        if self.logprobs is not None:
            self.logprobs = float_array(self.logprobs)
            if len(self.logprobs) != len(self.token_ids):
                raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Turn:
    """One action of the policy and its reward (None: the environment gave none)."""

    reward: float | None
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one episode, as a reward function or `EnvSpec.score_group` returns it.

    Without a `score` the reward is the score, where the environment's rewards lie in [0, 1].
    """

    reward: float | None
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Objective(StrEnum):
    """Kind of loss that a row's tokens enter. Each objective has a denominator of its own in a batch."""

    POLICY_GRADIENT = "policy_gradient"
    CROSS_ENTROPY = "cross_entropy"
    PREFERENCE = "preference"
    """Pairs of answers, the chosen and the rejected."""
    LABEL = "label"
    """Answers, or steps of them, that are good or bad."""


@dataclass(slots=True)
class Row:
    """One token sequence to train on: segments in order, their objective, the turns they hold.

    `len` counts its tokens.
    """

    segments: list[Segment]
    objective: Objective = Objective.POLICY_GRADIENT
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> array[int]:
        """Its tokens [T], an int32 array made of the segments' anew."""
        return array("i", itertools.chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def n_action_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments if segment.role == "action")

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and the turns that have some of them."""
        segments, n_turns = [], 0
        for segment in self.segments:
            if length <= 0:
                break
            for name in ("token_ids", "loss_weights", "logprobs"):
                if (values := getattr(segment, name)) is not None:
                    setattr(segment, name, values[:length])
            length -= len(segment)
            n_turns += segment.role == "action"
            segments.append(segment)
        self.segments, self.turns = segments, self.turns[:n_turns]


class Status(StrEnum):
    """End of an episode."""

    COMPLETED = "completed"
    """The environment returned `terminated`."""
    TRUNCATED = "truncated"
    """A limit ended it: the environment's (`truncated`) or a token, turn or context budget. It still counts."""
    FAILED = "failed"
    """Something broke that is not the policy's doing. It is counted and shown; it is never a reward of zero."""


class Limit(StrEnum):
    """The reason of a truncated episode: the limit it ran into. Agents of other packages may name their own."""

    LENGTH = "length"
    """The last answer was cut at the token budget of a turn (`rollout.max_tokens`)."""
    TOKENS = "tokens"
    """The token budget of the episode was used up (`agent.max_tokens`)."""
    TURNS = "turns"
    """The agent may take no more turns (`agent.max_turns`)."""
    CONTEXT = "context"
    """The model's context was full (`engine.max_model_len`)."""
    TEMPLATE = "template"
    """The chat template takes no further turn after what the policy said."""
    ENVIRONMENT = "environment"
    """The environment said `truncated`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`; `reason` is the `Limit` of a truncated episode, or the kind of a failure, in one word or two.

    `retryable` and `message` belong to failures.
    """

    status: Status
    reason: str = ""
    retryable: bool = False
    message: str = ""

    @classmethod
    def complete(cls) -> Outcome:
        return cls(Status.COMPLETED)

    @classmethod
    def truncate(cls, reason: str) -> Outcome:
        return cls(Status.TRUNCATED, str(reason))

    @classmethod
    def of(cls, terminated: bool, truncated: bool) -> Outcome:
        """The outcome after an episode's last step: the limit was the environment's, or else that of turns."""
        return cls.complete() if terminated else cls.truncate(Limit.ENVIRONMENT if truncated else Limit.TURNS)

    @classmethod
    def fail(cls, kind: str, message: str, *, retryable: bool = False) -> Outcome:
        return cls(Status.FAILED, kind, retryable, message)

    @property
    def completed(self) -> bool:
        return self.status is Status.COMPLETED

    @property
    def truncated(self) -> bool:
        return self.status is Status.TRUNCATED

    @property
    def failed(self) -> bool:
        return self.status is Status.FAILED


Span = tuple[str, float, float]
"""Name of a phase, its start and its end in seconds since 1970."""


@contextmanager
def timed(spans: list[Span], kind: str) -> Iterator[None]:
    """Add the time spent inside to `spans`."""
    start = time.time()
    try:
        yield
    finally:
        spans.append((kind, round(start, 4), round(time.time(), 4)))


@dataclass(slots=True)
class Episode:
    """Record of a policy's attempt at a task.

    `reward` is the sum of its turns' rewards, None when none was given; `score` in [0, 1] is what success
    rates and filters use: the environment's or, where it gives none and its rewards lie in [0, 1], the reward
    (`score_is_reward`). `answer` is what the policy answered as the environment read it (None: nothing it could read),
    by which majority votes count. `rows` are what is trained on; an episode has more than one only where its context
    was not one growing sequence. `messages` is the conversation, for people. `fingerprints` are hashes of what was
    played: the environment's `code`, its `spec`, the `task` and, outside training, the weights of the `model`.
    """

    id: str
    task: Task
    outcome: Outcome
    rows: list[Row] = field(default_factory=list)
    reward: float | None = None
    score: float | None = None
    score_is_reward: bool = False
    answer: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    env: str = ""
    group_id: str = ""
    member: int = 0
    seed: int = 0
    attempt: int = 0
    seconds: float = 0.0
    fingerprints: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list, compare=False)
    """Spans in which it waited, was sampled, stepped and judged, if just played. Not part of its record."""

    @property
    def failed(self) -> bool:
        return self.outcome.failed

    @property
    def purpose(self) -> str:
        """The purpose that its group is named by: a step of training, an environment of a suite."""
        return self.group_id.rpartition("/")[0]


@dataclass(slots=True)
class Group:
    """The episodes of one task that are compared with each other. Ragged where members failed.

    `superseded` are failed attempts that were retried, and so are not among `episodes`; `refills` is the number of
    members that another episode replaced once their retries were exhausted.
    """

    id: str
    task: Task
    episodes: list[Episode]
    superseded: list[Episode] = field(default_factory=list)
    refills: int = 0
