"""The record of an episode: its token sequences (rows of segments), its outcome, its group."""

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
SeedScope = Literal["task", "group", "episode"]
"""Episodes with the same environment seed: all of a task, the members of a group, or none."""


def float_array(values: Iterable[float]) -> array[float]:
    """Log-probabilities or weights as a float32 array: `values` itself if it is one."""
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


@dataclass(slots=True)
class Segment:
    """Consecutive tokens by one author.

    `token_ids` [T]; `loss_weights` [T]: the weight of each token in the row's objective (by default 1 on actions, 0
    elsewhere). Sampled actions have `logprobs` [T], in nats, under the distribution that they were sampled from, its
    `temperature`, and the policy `versions` that sampled them.

    Any iterables are accepted; they are stored as arrays, int32 and float32, which numpy reads without copying.
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
    """The reward of one episode: the return value of a reward function, or one of `EnvSpec.score_group`.

    Without a `score` the reward is the score, if the environment's rewards lie in [0, 1].
    """

    reward: float | None
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Objective(StrEnum):
    """Kind of loss for a row's tokens. Each objective has a separate denominator in a batch."""

    POLICY_GRADIENT = "policy_gradient"
    CROSS_ENTROPY = "cross_entropy"
    PREFERENCE = "preference"
    """Pairs of completions, the chosen and the rejected."""
    LABEL = "label"
    """Completions, or steps of them, labelled good or bad."""


@dataclass(slots=True)
class Row:
    """One token sequence to train on: segments in order, their objective, and a turn per action segment.

    `len` is its number of tokens.
    """

    segments: list[Segment]
    objective: Objective = Objective.POLICY_GRADIENT
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> array[int]:
        """Its tokens [T], a new int32 array."""
        return array("i", itertools.chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def n_action_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments if segment.role == "action")

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and the turns with at least one of them."""
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
    """A limit ended it: the environment's (`truncated`) or a token, turn or context budget. Its reward counts."""
    FAILED = "failed"
    """An error ended it that the policy is not known to have caused. It is counted and reported, and has no reward
    unless `rollout.failed_reward` gives its kind of failure one."""


class Limit(StrEnum):
    """The limit that truncated an episode. Agents of other packages may add reasons, as plain strings."""

    LENGTH = "length"
    """The last turn ended at its token budget (`rollout.max_tokens`)."""
    TOKENS = "tokens"
    """The token budget of the episode was used up (`agent.max_tokens`)."""
    TURNS = "turns"
    """The turn budget of the episode was used up (`agent.max_turns`)."""
    CONTEXT = "context"
    """The model's context was full (`engine.max_model_len`)."""
    TEMPLATE = "template"
    """The chat template cannot render another turn after the policy's last one."""
    TIME = "time"
    """The policy's time in the engine was used up (`rollout.policy_timeout`)."""
    ENVIRONMENT = "environment"
    """The environment returned `truncated`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode. `reason` is the `Limit` of a truncated episode, or the kind of a failure.

    `retryable` and `message` are set for failures only.
    """

    status: Status
    reason: str = ""
    retryable: bool = False
    message: str = ""

    @classmethod
    def finish(cls) -> Outcome:
        return cls(Status.COMPLETED)

    @classmethod
    def truncate(cls, reason: str) -> Outcome:
        return cls(Status.TRUNCATED, str(reason))

    @classmethod
    def from_step(cls, terminated: bool, truncated: bool) -> Outcome:
        """The outcome after an episode's last env step; if that set neither flag, the turn limit ended the episode."""
        return cls.finish() if terminated else cls.truncate(Limit.ENVIRONMENT if truncated else Limit.TURNS)

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
    """Context manager that adds a span, from its start to its end, to `spans`."""
    start = time.time()
    try:
        yield
    finally:
        spans.append((kind, round(start, 4), round(time.time(), 4)))


@dataclass(slots=True)
class Episode:
    """Record of a policy's attempt at a task.

    `reward` is the sum of its turns' rewards, None if no turn has one. `score`, in [0, 1], is for success rates and
    filters: the environment's or, if it gives none and its rewards lie in [0, 1], the reward (`score_is_reward`).
    `answer` is the policy's answer as parsed by the environment (None: there is none), for majority votes. `rows` are
    the token sequences to train on; there are several only if the context did not grow as one sequence. `messages` is
    the conversation, for people. `fingerprints` are hashes of the environment's `code`, its `spec`, the `task` and,
    outside training, the weights of the `model`.
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
    """Spans of waiting, sampling, env steps and group scoring, in the process that ran it. Not part of the record."""

    @property
    def failed(self) -> bool:
        return self.outcome.failed

    @property
    def is_counted(self) -> bool:
        """True if it did not fail, or its failure has a reward (`rollout.failed_reward`): it is trained on, and counts
        in rewards and scores."""
        return not self.failed or self.reward is not None

    @property
    def purpose(self) -> str:
        """The part of its group's id before the number: a training step, or an environment of a suite."""
        return self.group_id.rpartition("/")[0]


@dataclass(slots=True)
class Group:
    """The episodes of one task that are compared with each other. Groups with failed members are smaller.

    `superseded` are failed attempts that were retried, and are not in `episodes`; `refills` is the number of members
    that another episode replaced after their retries were exhausted.
    """

    id: str
    task: Task
    episodes: list[Episode]
    superseded: list[Episode] = field(default_factory=list)
    refills: int = 0
