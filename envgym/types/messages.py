"""The conversation between environment and policy: messages, tools, tasks, observations and actions."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any


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
        where it is true: templates and APIs get messages that are `rewrite` has escaped, in which it is not.
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


def observed_messages(observation: Observation) -> tuple[Message, ...]:
    """An observation as messages; raw text is the user's."""
    return (Message.of("user", observation.text),) if observation.text else observation.messages


class StopReason(StrEnum):
    """Reason why the policy's turn ended."""

    STOP = "stop"
    """The model ended its turn (end-of-turn token or stop string)."""
    LENGTH = "length"
    """The turn's or the episode's token budget ran out."""


def int_array(values: Iterable[int]) -> array[int]:
    """Token ids as an int32 array: `values` itself where it is one. Raises `ValueError` beyond int32."""
    if isinstance(values, array) and values.typecode == "i":
        return values
    try:
        return array("i", list(values) if isinstance(values, bytes) else values)  # else bytes are taken as memory
    except OverflowError:
        raise ValueError("a token id does not fit into 32 bits") from None


class _AsList:
    """Tells pydantic that token ids are a list of numbers in JSON."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        to_list = core_schema.plain_serializer_function_ser_schema(list)
        return core_schema.list_schema(core_schema.int_schema(), serialization=to_list)


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy: its text without special tokens (the markup of tool calls included), the exact
    token ids [T] (int32; empty where the engine tells none), parsed tool calls, and why it stopped. `content` is the
    text beside the calls, where the agent can tell it from their markup (None: it is `text`).

    Token ids may be given as any iterable.
    """

    text: str
    token_ids: Annotated[Sequence[int], _AsList] = field(default_factory=lambda: array("i"))
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = StopReason.STOP
    content: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", int_array(self.token_ids))
