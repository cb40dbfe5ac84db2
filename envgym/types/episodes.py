"""The record of an episode: its token sequences (rows with arrays for learners), checked numbers, outcome and group."""

from __future__ import annotations

import contextlib
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from envgym.errors import describe

from .images import ImageSpan
from .messages import Message, StopReason, Task, int_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]
    IntArray = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of a generation were sampled with policy weights `version`."""

    version: int
    start: int
    end: int


Role = Literal["prompt", "action", "feedback"]
SeedScope = Literal["task", "group", "episode"]
"""Episodes with the same environment seed: all of a task, the members of a group, or none."""
MAX_NAME = 200
"""Maximum characters of a metric's name, which may be a server's."""


def float_array(values: Iterable[float]) -> array[float]:
    """Log-probabilities or weights as a float32 array: `values` itself if it is one."""
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


@dataclass(slots=True)
class Segment:
    """Consecutive tokens by one author.

    `token_ids` [T]; `loss_weights` [T]: the weight of each token in the row's objective (by default 1 on actions, 0
    elsewhere). Sampled actions have `logprobs` [T], in nats, under the distribution that they were sampled from, its
    `temperature`, and the policy `versions` that sampled them.

    `images` are its images, in order: the placeholder tokens of each, counted from the segment's first token.

    Any iterables are accepted; they are stored as arrays, int32 and float32, which numpy reads without copying.
    `len` is T. Raises `ValueError` for arrays of other lengths, and images that are not within the segment.
    """

    role: Role
    token_ids: array[int]
    loss_weights: array[float] = field(default_factory=lambda: array("f"))
    logprobs: array[float] | None = None
    versions: tuple[VersionSpan, ...] = ()
    temperature: float = 1.0
    images: tuple[ImageSpan, ...] = ()

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
        end = 0
        for image in self.images:
            if not end <= image.start < image.end <= len(self.token_ids):
                raise ValueError(f"{image} is not within {len(self.token_ids)} tokens, after the image before it")
            end = image.end

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


def check_numbers(reward: Any, info: dict[str, Any]) -> float | None:
    """Convert a step's reward to a number, and `score` and `metrics` in `info`, in place. Raises `ValueError`."""
    number = None if reward is None else _number("a reward", reward)
    if (score := info.get("score")) is not None:
        info["score"] = score = _number("a score", score)
        if not 0 <= score <= 1:
            raise ValueError(f"a score lies in [0, 1], not at {score:g}")
    if (metrics := info.get("metrics")) is not None:
        if not isinstance(metrics, Mapping):
            raise ValueError(f"info['metrics'] is names to numbers, not {describe(metrics)}")
        info["metrics"] = finite_metrics(metrics)
    return number


def _number(label: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # the usual case: the check below is slow
        return value
    if not isinstance(value, Real) and not hasattr(value, "__float__"):
        raise ValueError(f"{label} is a number or None, not {describe(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several numbers, say
        raise ValueError(f"{label} is one number, not {value!r:.80} ({error})") from None
    if not math.isfinite(number):
        raise ValueError(f"{label} must be finite, not {number}")
    return number


def finite_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics that are finite numbers with names of at most `MAX_NAME` characters, and the number of others as
    `invalid_metrics`."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if math.isfinite(number := float(value)) and len(str(name)) <= MAX_NAME:
                numbers[str(name)] = number
    n_invalid = len(metrics) - len(numbers)
    return numbers | {"invalid_metrics": float(n_invalid)} if n_invalid else numbers


class Objective(StrEnum):
    """Kind of loss for a row's tokens. Each objective has a separate denominator in a batch."""

    POLICY_GRADIENT = "policy_gradient"
    CROSS_ENTROPY = "cross_entropy"
    PREFERENCE = "preference"
    """Pairs of completions, the chosen and the rejected."""
    LABEL = "label"
    """Completions, or steps of them, labelled good or bad."""


Answer = tuple[int, float | None]
"""The tokens of a turn, and its surprise: their mean -log p in nats (None: they have no log-probabilities)."""


def token_temperatures(temperatures: Sequence[float], lengths: Sequence[int]) -> FloatArray | None:
    """The sampling temperature of each token of some segments; None if all are 1."""
    import numpy as np

    if all(temperature == 1 for temperature in temperatures):
        return None
    return np.repeat(np.array(temperatures, np.float32), lengths)


def _surprise(logprobs: array[float] | None) -> float | None:
    return -(math.fsum(logprobs) / len(logprobs)) if logprobs else None


ROW_ARRAYS = ("token_ids", "loss_weights", "old_logprobs", "temperatures")
"""The attributes of a row that are made from its segments."""
NO_OUTPUTS = dict.fromkeys(("first_outputs", "last_outputs", "entropies", "pushes"))


@dataclass
class Row:
    """One token sequence of length T to train on: segments in order, their objective, and a turn per action segment.

    Segments and turns are the record. Learners and workers use numpy arrays over the tokens, which are made from the
    segments when they are first read, and may be replaced: the record does not change with them.

    token_ids      [T] int32
    loss_weights   [T] float32, weight of token t in the loss (predicted from the tokens before it); [0] is 0
    old_logprobs   [T] float32 nats, the sampler's log-probabilities; NaN for tokens that were not sampled
    temperatures   [T] float32, the sampling temperature of each action token; None: all 1
    arrays         name -> [T] or [T, …] float32: outputs of scoring roles, by role; inputs of the learner's loss
    microbatch_key rows with the same key (a pair, an episode) form a unit, which stays in one micro-batch
    episode_index  index of the episode within the training step, for aggregation by episode
    group_index    index of its group within the training step, for metrics of groups
    is_on_policy   whether the weights about to be trained sampled all of its actions
    first_outputs  [T] float32, outputs of the policy's model for it in the step's first pass over it, before that
                   pass's optimizer step; None before the pass
    last_outputs   the same of the last pass
    entropies      [T] float32 nats, those of the distributions of `first_outputs`
    pushes         [T] float32, minus the gradient of the loss by `first_outputs` in that pass: how strongly it makes
                   each token more likely

    `len` is T.
    """

    segments: list[Segment]
    objective: Objective = Objective.POLICY_GRADIENT
    turns: list[Turn] = field(default_factory=list)
    arrays: dict[str, FloatArray] = field(default_factory=dict, compare=False, repr=False)
    microbatch_key: int = field(default=0, compare=False, repr=False)
    episode_index: int = field(default=0, compare=False, repr=False)
    group_index: int = field(default=0, compare=False, repr=False)
    is_on_policy: bool = field(default=True, compare=False, repr=False)
    first_outputs: FloatArray | None = field(default=None, compare=False, repr=False)
    last_outputs: FloatArray | None = field(default=None, compare=False, repr=False)
    entropies: FloatArray | None = field(default=None, compare=False, repr=False)
    pushes: FloatArray | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_arrays(
        cls,
        token_ids: IntArray,
        loss_weights: FloatArray,
        old_logprobs: FloatArray,
        objective: Objective,
        **fields: Any,
    ) -> Row:
        """A row without a record; `fields` are further ones of its attributes."""
        arrays = {"token_ids": token_ids, "loss_weights": loss_weights, "old_logprobs": old_logprobs}
        return cls([], objective).copy_with(**arrays, **{"temperatures": None, **fields})

    @cached_property
    def token_ids(self) -> IntArray:
        import numpy as np

        return np.concatenate([segment.token_ids for segment in self.segments], dtype=np.int32)

    @cached_property
    def loss_weights(self) -> FloatArray:
        import numpy as np

        weights = np.concatenate([segment.loss_weights for segment in self.segments], dtype=np.float32)
        weights[:1] = 0.0  # nothing predicts the first token
        return weights

    @cached_property
    def old_logprobs(self) -> FloatArray:
        import numpy as np

        result = np.full(len(self), np.nan, np.float32)
        end = 0
        for segment in self.segments:
            end += len(segment.token_ids)
            if segment.logprobs is not None:
                result[end - len(segment.token_ids) : end] = segment.logprobs
        return result

    @cached_property
    def temperatures(self) -> FloatArray | None:
        return token_temperatures([s.temperature for s in self.segments], [len(s.token_ids) for s in self.segments])

    @cached_property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images of its segments, whose positions count from its first token."""
        spans, start = list[ImageSpan](), 0
        for segment in self.segments:
            spans += [image._replace(start=start + image.start) for image in segment.images]
            start += len(segment)
        return tuple(spans)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that sampled its actions, ascending."""
        return tuple(sorted({span.version for segment in self.segments for span in segment.versions}))

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The index after the last token of each action segment."""
        ends = accumulate(map(len, self.segments))
        return tuple([end for segment, end in zip(self.segments, ends, strict=True) if segment.role == "action"])

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The length and the surprise of each action segment."""
        answers = [segment for segment in self.segments if segment.role == "action"]
        return tuple([(len(answer), _surprise(answer.logprobs)) for answer in answers])

    @property
    def turn_counts(self) -> tuple[int, int]:
        """The number of turns, and of those that ended at their token budget."""
        return len(self.turns), sum([turn.stop_reason is StopReason.LENGTH for turn in self.turns])

    @property
    def n_action_tokens(self) -> int:
        """Number of tokens in the policy's turns, sampled or demonstrated."""
        return sum([len(segment.token_ids) for segment in self.segments if segment.role == "action"])

    def __len__(self) -> int:
        return sum([len(segment.token_ids) for segment in self.segments]) if self.segments else len(self.token_ids)

    def copy_with(self, **attributes: Any) -> Row:
        """A copy with other values of some attributes; all others are shared with this row."""
        row: Row = object.__new__(type(self))
        vars(row).update(vars(self), **attributes)
        return row

    def without_record(self, **attributes: Any) -> Row:
        """A copy that holds its arrays alone, for workers, with other values of some attributes."""
        for name in (*ROW_ARRAYS, "images"):
            getattr(self, name)  # made from the segments, if they are not yet
        return self.copy_with(segments=[], turns=[], **NO_OUTPUTS, **attributes)

    def drop_sampling_info(self) -> None:
        """Treat tokens that were sampled at another temperature than 1 as plain data: clear the temperatures and the
        sampler's log-probabilities."""
        import numpy as np

        if self.temperatures is not None and (self.temperatures != 1).any():
            self.temperatures, self.old_logprobs = None, np.full_like(self.old_logprobs, np.nan)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and the turns with at least one of them. Of an image that does not fit, no
        token is kept, nor any after it."""
        length = next((image.start for image in self.images if image.start < length < image.end), length)
        segments, n_turns = [], 0
        for segment in self.segments:
            if length <= 0:
                break
            for name in ("token_ids", "loss_weights", "logprobs"):
                if (values := getattr(segment, name)) is not None:
                    setattr(segment, name, values[:length])
            segment.images = tuple([image for image in segment.images if image.end <= length])
            length -= len(segment)
            n_turns += segment.role == "action"
            segments.append(segment)
        self.segments, self.turns = segments, self.turns[:n_turns]
        self.reset_arrays()

    def reset_arrays(self) -> None:
        """Make the arrays from the segments again when they are next read: the segments have changed."""
        if self.segments:
            self._drop_arrays()

    def _drop_arrays(self) -> None:
        for name in (*ROW_ARRAYS, "images"):
            vars(self).pop(name, None)


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


@contextlib.contextmanager
def timed(spans: list[Span], kind: str) -> Iterator[None]:
    """Context manager that adds a span, from its start to its end, to `spans`."""
    start = time.time()
    try:
        yield
    finally:
        spans.append((kind, round(start, 4), round(time.time(), 4)))


@dataclass(slots=True)
class Tally:
    """What an environment gave in an episode, counted apart from the agent's record: the sum of its `rewards` (None:
    it gave none), and whether a turn of its own `stops` had other stops than the run's."""

    rewards: float | None = None
    stops: bool = False

    def add(self, observation: Any, reward: float | None) -> None:
        """Count an observation and the reward that came with it."""
        if reward is not None:
            self.rewards = reward + (self.rewards or 0.0)
        if observation.sampling:
            self.stops |= any(name.startswith("stop") for name in observation.sampling)


@dataclass(slots=True)
class Episode:
    """Record of a policy's attempt at a task.

    `reward` is the sum of its turns' rewards, None if no turn has one. `score`, in [0, 1], is for success rates and
    filters: the environment's or, if it gives none and its rewards lie in [0, 1], the reward (`score_is_reward`).
    `answer` is the policy's answer as parsed by the environment (None: there is none), for majority votes. `rows` are
    the token sequences to train on; there are several only if the context did not grow as one sequence. `messages` is
    the conversation, for people. Of a branch (`rollout.branches`) the first `parent_turn` turns are those of the
    episode with the id `parent`. `fingerprints` are hashes of the environment's `code`, its `spec`, the `task` and,
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
    parent: str = ""
    parent_turn: int = 0
    seconds: float = 0.0
    fingerprints: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list, compare=False)
    """Spans of waiting, sampling, env steps and group scoring, in the process that ran it. Not part of the record."""
    n_spelled: int | None = field(default=None, compare=False)
    """The number of the policy's messages that spell out a special token as text; None if its messages tell. Not part
    of the record."""
    tally: Tally | None = field(default=None, compare=False)
    """Not part of the record."""

    @property
    def failed(self) -> bool:
        return self.outcome.failed

    @property
    def is_counted(self) -> bool:
        """True if it did not fail, or its failure has a reward (`rollout.failed_reward`): it is trained on, and counts
        in rewards and scores."""
        return not self.failed or self.reward is not None

    @property
    def n_action_tokens(self) -> int:
        """Number of tokens in the policy's turns, sampled or demonstrated."""
        return sum([row.n_action_tokens for row in self.rows])

    @property
    def n_new_tokens(self) -> int:
        """Number of tokens in the policy's turns, without those that are its parent's."""
        if not self.parent:
            return self.n_action_tokens
        return sum([length for row in self.rows for length, _ in row.answers][self.parent_turn :])

    def count_messages(self, matches: Callable[[str], object]) -> int:
        """The number of the policy's messages that match."""
        return sum(message.role == "assistant" and bool(matches(message.text)) for message in self.messages)

    @property
    def purpose(self) -> str:
        """The part of its group's id before the number: a training step, or an environment of a suite."""
        return self.group_id.rpartition("/")[0]


@dataclass(slots=True)
class Group:
    """The episodes of one task that are compared with each other. Groups with failed members are smaller.

    `superseded` are failed attempts that were retried, and are not in `episodes`; `refills` is the number of members
    that another episode replaced after their retries were exhausted, `unrepeated` that of branches that were left out,
    since the environment did not repeat their parents' turns.
    """

    id: str
    task: Task
    episodes: list[Episode]
    superseded: list[Episode] = field(default_factory=list)
    refills: int = 0
    unrepeated: int = 0


def turn_node(episode: Episode, turn: int, episodes: Mapping[str, Episode]) -> tuple[str, int]:
    """The node of an episode's turn in the tree of its group, of which `episodes` are the members by id: the id of the
    episode that sampled the turn, and the turn's number, from 0."""
    while turn < episode.parent_turn:
        if episode.parent not in episodes:
            return episode.parent, turn
        episode = episodes[episode.parent]
    return episode.id, turn


def number_rows(groups: Sequence[Group]) -> Sequence[Group]:
    """Number the episodes and groups of a training step in their rows, in order. All rows of an episode share a
    micro-batch. Returns the groups."""
    number = 0
    for index, group in enumerate(groups):
        for episode in group.episodes:
            for row in episode.rows:
                row.reset_arrays()  # an agent may have read them before the episode's end
                row.microbatch_key = row.episode_index = number
                row.group_index = index
            number += 1
    return groups
