"""The words every part speaks: tasks, observations, actions, episodes and the rows they leave to train on.

Plain dataclasses without heavy imports. They cross process boundaries by pickle and become rows of a
columnar file in the run folder.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

# ---------------------------------------------------------------------------------------------------------
# Messages between environment and policy


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message. Other kinds of part (images) join it here."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the policy may call: its name, what it does, and a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The `{"type": "function", …}` form that chat templates and OpenAI-compatible APIs take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call the policy wrote, its `arguments` parsed from JSON.

    A call that cannot be read has an `error`, a sentence to tell the policy; then `arguments` is empty, and `name`
    too where none could be made out.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: `role` is `system`, `user`, `assistant` or `tool`; `content` is a tuple of parts.

    An assistant's message may hold `tool_calls`; a tool's result has the call it answers (`tool_call_id`) and by
    which tool (`name`). With `from_others` it holds words of the policy, a tool or another player, in which special
    tokens are characters; a tool's result and what answers the policy are always taken so.
    """

    role: str
    content: tuple[TextPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    from_others: bool = False

    @classmethod
    def of(cls, role: str, text: str) -> Message:
        return cls(role, (TextPart(text),))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)

    def as_dict(self, *, arguments_as_text: bool = False) -> dict[str, Any]:
        """The form that chat templates and OpenAI-compatible APIs take, `{"role": …, "content": …}` at least.

        A call's arguments are a mapping, as templates want them, or JSON text, as the APIs do. `from_others` is there
        where it is true: templates and APIs get messages that are `rewritten`, in which it is not.
        """
        result: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            result["tool_calls"] = []
            for call in self.tool_calls:
                arguments = json.dumps(dict(call.arguments)) if arguments_as_text else dict(call.arguments)
                function = {"name": call.name, "arguments": arguments}
                result["tool_calls"].append({"id": call.id, "type": "function", "function": function})
        if self.tool_call_id:
            result["tool_call_id"] = self.tool_call_id
        if self.name:
            result["name"] = self.name
        if self.from_others:
            result["from_others"] = True
        return result


def as_messages(prompt: str | Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """Normalise a prompt: a string becomes one user message, mappings become `Message`.

    Raises `TypeError` for anything else.
    """
    if isinstance(prompt, str):
        return (Message.of("user", prompt),)
    messages = []
    for item in prompt:
        if isinstance(item, Message):
            messages.append(item)
        elif isinstance(item, Mapping) and isinstance(item.get("role"), str):
            messages.append(_message(item))
        else:
            raise TypeError(f"a prompt is a string or a list of {{'role', 'content'}} messages, not {item!r}")
    return tuple(messages)


def _message(item: Mapping[str, Any]) -> Message:
    """The inverse of `Message.as_dict`; a call's arguments may be JSON text, as the APIs write them."""
    content = item.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    calls = []
    for call in item.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append(ToolCall(str(call.get("id", "")), function["name"], arguments, call.get("error") or ""))
    ids = (str(item.get("tool_call_id") or ""), str(item.get("name") or ""))
    others = bool(item.get("from_others"))
    return Message(item["role"], tuple(TextPart(text) for text in texts), tuple(calls), *ids, from_others=others)


@dataclass(frozen=True, slots=True)
class Task:
    """One problem, as data.

    `id` is unique within its task set; `prompt` is plain text or messages; `answer` is what the
    environment checks against; `fields` holds whatever else the row had; `difficulty` is free in scale;
    `seed` is the reset seed that makes the problem, for environments that make problems from seeds; `env` is the
    member of a mixture that poses it.
    """

    id: str
    prompt: str | tuple[Message, ...] = ""
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    difficulty: float | None = None
    seed: int | None = None
    env: str = ""

    @property
    def key(self) -> str:
        """Unique within a run, also where several environments share it."""
        return f"{self.env}/{self.id}" if self.env else self.id


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's message to the policy: chat `messages`, or raw `text` (base models, untemplated feedback).

    `sampling` overrides fields of the next turn's sampling parameters (`{"max_tokens": 64}`); its `stop` is a text, and
    the turn ends with the first token that holds it. `tools` are what the
    policy may call; they come with an episode's first observation and hold for all of it.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    sampling: Mapping[str, Any] | None = None
    tools: tuple[ToolSpec, ...] = ()


def as_observation(value: Any) -> Observation:
    """Accept what environments find natural to return: an `Observation`, raw text, messages, or None.

    Raises `TypeError` for anything else.
    """
    if isinstance(value, Observation):
        return value
    if value is None:
        return Observation()
    if isinstance(value, str):
        return Observation(text=value)
    if isinstance(value, Message):
        return Observation(messages=(value,))
    if isinstance(value, Sequence):
        return Observation(messages=as_messages(value))
    raise TypeError(f"an observation is text, messages or an Observation, not {type(value).__name__}")


class StopReason(StrEnum):
    """Reason why the policy's turn ended."""

    STOP = "stop"
    """The model ended its turn (end-of-turn token or stop string)."""
    LENGTH = "length"
    """The turn's or the episode's token budget ran out."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy: its text without special tokens (the markup of tool calls included), the exact
    token ids, parsed tool calls, and why it stopped. `content` is the text beside the calls, where the agent can tell
    it from their markup (None: it is `text`)."""

    text: str
    token_ids: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = StopReason.STOP
    content: str | None = None


# ---------------------------------------------------------------------------------------------------------
# The record of an episode


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens `[start, end)` of a generation were sampled with policy weights `version`."""

    version: int
    start: int
    end: int


Role = Literal["prompt", "action", "feedback"]


def int_array(values: Iterable[int]) -> array[int]:
    """Token ids as an int32 array: `values` itself where it is one. Raises `ValueError` beyond int32."""
    if isinstance(values, array) and values.typecode == "i":
        return values
    try:
        return array("i", values)
    except OverflowError:
        raise ValueError("a token id does not fit into 32 bits") from None


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


@dataclass(slots=True)
class Turn:
    """One action of the policy and its reward (None: the environment gave none)."""

    reward: float | None
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Judgement:
    """An environment's judgement of one episode once its whole group is finished (`EnvSpec.score_group`).

    Without a `score` the reward is one, where the environment's rewards lie in [0, 1].
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
    """One token sequence to train on: segments in order, their objective, the turns they hold."""

    segments: list[Segment]
    objective: Objective = Objective.POLICY_GRADIENT
    turns: list[Turn] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def n_action_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.role == "action")

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, and the turns that have some of them."""
        kept, n_turns = [], 0
        for segment in self.segments:
            if length <= 0:
                break
            for name in ("token_ids", "loss_weights", "logprobs"):
                if (values := getattr(segment, name)) is not None:
                    setattr(segment, name, values[:length])
            length -= len(segment.token_ids)
            n_turns += segment.role == "action"
            kept.append(segment)
        self.segments, self.turns = kept, self.turns[:n_turns]


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
    def completed(cls) -> Outcome:
        return cls(Status.COMPLETED)

    @classmethod
    def truncated(cls, reason: str) -> Outcome:
        return cls(Status.TRUNCATED, str(reason))

    @classmethod
    def failed(cls, kind: str, message: str, *, retryable: bool = False) -> Outcome:
        return cls(Status.FAILED, kind, retryable, message)


Span = tuple[str, float, float]
"""Name of a phase, its start and its end in seconds since 1970."""


@contextmanager
def timed(spans: list[Span], kind: str) -> Iterator[None]:
    """Add the time spent inside to `spans`."""
    began = time.time()
    try:
        yield
    finally:
        spans.append((kind, round(began, 4), round(time.time(), 4)))


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
    group: str = ""
    member: int = 0
    seed: int = 0
    attempt: int = 0
    seconds: float = 0.0
    fingerprints: dict[str, str] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list, compare=False)
    """Spans in which it waited, was sampled, stepped and judged, if just played. Not part of its record."""

    @property
    def failed(self) -> bool:
        return self.outcome.status is Status.FAILED

    @property
    def purpose(self) -> str:
        """The purpose that its group is named by: a step of training, an environment of a suite."""
        return self.group.rpartition("/")[0]


@dataclass(slots=True)
class Group:
    """The episodes of one task that are compared with each other. Ragged where members failed.

    `lost` are failed attempts that were played again, and so are not among `episodes`; `refills` of them had failed
    for good, and another episode took their place.
    """

    id: str
    task: Task
    episodes: list[Episode]
    lost: list[Episode] = field(default_factory=list)
    refills: int = 0
