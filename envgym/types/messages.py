"""The conversation between environment and policy: messages, tools, tasks, observations and actions."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from envgym.errors import InvalidStep, coroutines_in, describe

from .conversations import CALL, called_in, known_role, parts_of, with_thought
from .images import FORMS, ImagePart


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message."""

    text: str


class _Part:
    """Tells pydantic that a part with a `sha256` is an image, so that its errors are those of an image."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def kind(part: Any) -> str:
            return "image" if isinstance(part, ImagePart) or (isinstance(part, dict) and "sha256" in part) else "text"

        choices = {"text": handler.generate_schema(TextPart), "image": handler.generate_schema(ImagePart)}
        return core_schema.tagged_union_schema(choices, kind)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the policy may call: its name, its description, and a JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The `{"type": "function", …}` form that chat templates and OpenAI-compatible APIs take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call by the policy, with `arguments` parsed from JSON.

    A call that cannot be parsed has an `error`, a sentence for the policy; then `arguments` is empty, and so is `name`
    if none could be read.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: `Message("user", "hi")`, or `Message.user("hi")`; with an image `Message.user("See:", image)`.

    `role` is `system`, `user`, `assistant` or `tool`. `content` is text, an image (see `ImagePart.from_value`), or a
    list of them, and is stored as a tuple of `TextPart` and `ImagePart`. An assistant's message may hold `tool_calls`;
    a tool's result names its call (`tool_call_id`) and the tool (`name`). `from_others` marks text by the policy, a
    tool or another player: special tokens spelled in it are ordinary characters. Tool results and replies to the policy
    are always rendered so.

    `weight` is the weight of a recorded turn in the loss; a turn of weight 0 is not trained on. `unlearned` are the
    parts of its text that are not trained on, as (start, end), the end excluded. Both count characters from the end of
    the text: -1 is the last one, 0 the position after it. Messages that differ only in `weight` and `unlearned` are
    equal.

    Raises `TypeError` for content of another type, and `ValueError` for a file that is no image.
    """

    role: str
    content: tuple[Annotated[TextPart | ImagePart, _Part], ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    from_others: bool = False
    weight: float = field(default=1.0, compare=False)
    unlearned: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    if TYPE_CHECKING:  # `__post_init__` converts these wider types

        def __init__(
            self, role: str, content: Any, tool_calls: tuple[ToolCall, ...] = (),
            tool_call_id: str = "", name: str = "", from_others: bool = False, weight: float = 1.0,
            unlearned: tuple[tuple[int, int], ...] = (),
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        parts: Any = self.content if isinstance(self.content, list | tuple) else (self.content,)
        content: list[TextPart | ImagePart] = []
        for part in parts:
            if isinstance(part, str | TextPart):
                content.append(TextPart(part) if isinstance(part, str) else part)
                continue
            try:
                content.append(ImagePart.from_value(part))
            except TypeError:
                kind = type(part).__name__
                raise TypeError(
                    f"the content of a message is text, an image ({FORMS}), or a list of these, not {kind}"
                ) from None
        object.__setattr__(self, "content", tuple(content))

    @classmethod
    def system(cls, text: str) -> Message:
        return cls("system", text)

    @classmethod
    def user(cls, *parts: Any) -> Message:
        return cls("user", parts)

    @classmethod
    def assistant(cls, text: str) -> Message:
        return cls("assistant", text)

    @property
    def text(self) -> str:
        """Its text, without its images."""
        return "".join([part.text for part in self.content])

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """Its images, in order."""
        return tuple([part for part in self.content if isinstance(part, ImagePart)])

    @property
    def printed(self) -> str:
        """Its content for people: `[image 64 x 48]` stands for an image."""
        return "".join([part.label if isinstance(part, ImagePart) else part.text for part in self.content])

    def as_dict(
        self, *, arguments_as_text: bool = False, with_errors: bool = False,
        image: Callable[[ImagePart], Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The form that chat templates and OpenAI-compatible APIs take, `{"role": …, "content": …}` at least.

        The content of a message with images is a list of parts, its images in the form that `image` makes of them.
        Without `image`, as in records, it is the text, and `parts` has the parts with the images' names.

        A call's arguments are a mapping, which templates expect, or JSON text, which APIs expect. The key `from_others`
        appears only if it is true; templates and APIs get escaped messages, where it is false. `with_errors` adds the
        `error` of a malformed call, for records.
        """
        result: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.images:
            parts = [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else part.as_dict() if image is None else image(part)
                for part in self.content
            ]  # fmt: skip
            result["parts" if image is None else "content"] = parts
        if self.tool_calls:
            result["tool_calls"] = []
            for call in self.tool_calls:
                arguments = json.dumps(dict(call.arguments)) if arguments_as_text else dict(call.arguments)
                function = {"name": call.name, "arguments": arguments}
                result["tool_calls"].append({"id": call.id, "type": "function", "function": function})
                if with_errors and call.error:
                    result["tool_calls"][-1]["error"] = call.error
        if self.tool_call_id:
            result["tool_call_id"] = self.tool_call_id
        if self.name:
            result["name"] = self.name
        if self.from_others:
            result["from_others"] = True
        return result


def joined_text(messages: Sequence[Message]) -> str:
    """The texts of messages, with a line break between two of them, and `[image 64 x 48]` for an image."""
    return "\n".join([message.printed for message in messages])


def add_instruction(prompt: str | Sequence[Message], instruction: str, separator: str = "\n\n") -> list[Message]:
    """The prompt's messages with an instruction: at the end of the last message if the user wrote it, else as a new
    one. An empty instruction adds nothing."""
    messages = list(as_messages(prompt))
    if instruction:
        parts: list[Any] = [instruction]
        if messages and messages[-1].role == "user":
            last = messages.pop()
            parts = (
                [*last.content, f"{separator}{instruction}"] if last.images else [last.text + separator + instruction]
            )
        messages.append(Message("user", parts))
    return messages


def as_messages(
    prompt: str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]],
) -> tuple[Message, ...]:
    """Convert a prompt to messages. Text becomes one user message, a mapping a `Message`, a single message a list of
    one. Mappings may be in other programs' forms (`conversations`).

    Raises `TypeError` for anything else, and for parts that are neither text nor an image; `ValueError` for a call that
    names no tool, and for a file that is no image.
    """
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    messages = []
    for item in [prompt] if isinstance(prompt, Message | Mapping) else prompt:
        if isinstance(item, Message):
            messages.append(item)
        elif isinstance(item, Mapping) and isinstance(item.get("role"), str):
            message = _message(item)
            if known_role(item["role"]) == CALL and messages and messages[-1].role == "assistant":
                previous = messages.pop()  # a turn and its calls are one message
                calls = (*previous.tool_calls, *message.tool_calls)
                weight = min(previous.weight, message.weight)
                content = (*previous.content, *message.content)
                message = replace(previous, content=content, tool_calls=calls, weight=weight)
            messages.append(message)
        else:
            raise TypeError(f"a prompt is a string or a list of {{'role', 'content'}} messages, not {item!r}")
    return tuple(messages)


def _message(item: Mapping[str, Any]) -> Message:
    """The inverse of `Message.as_dict`; a call's arguments may be JSON text, as the APIs write them."""
    role, content = known_role(item["role"]), _recorded_parts(item) or item.get("content") or ""
    described = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if role == CALL:
        role = "assistant"
        content, described = called_in(content)
    parts = parts_of(content)
    if role == "assistant":
        parts = with_thought(item, parts)
    calls = []
    for call in _parsed(described, "a call"):
        function = (call.get("function") or call) if isinstance(call, Mapping) else {}
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"a call names its function, not {call!r:.60}")
        arguments = _parsed(function.get("arguments") or {}, function["name"])
        calls.append(ToolCall(str(call.get("id", "")), function["name"], arguments, call.get("error") or ""))
    ids = (str(item.get("tool_call_id") or ""), str(item.get("name") or ""))
    weight = item["weight"] if isinstance(item.get("weight"), int | float) else 1.0
    unlearned = item["unlearned"] if isinstance(item.get("unlearned"), tuple) else ()  # no file holds tuples
    return Message(role, parts, tuple(calls), *ids, bool(item.get("from_others")), weight, unlearned)


def _recorded_parts(item: Mapping[str, Any]) -> list[Any]:
    """The parts of a record's message with images, which a Parquet file has as JSON text. Empty for other messages."""
    parts: Any = item.get("parts")
    if isinstance(parts, str) and '"sha256"' in parts:
        parts = _parsed(parts, "the parts of a message")
    if not isinstance(parts, list):
        return []
    return parts if any(isinstance(part, Mapping) and "sha256" in part for part in parts) else []


def change_images(messages: Iterable[Message], change: Callable[[ImagePart], ImagePart]) -> tuple[Message, ...]:
    """The messages with every image as `change` returns it."""

    def changed(message: Message) -> Message:
        parts = [change(part) if isinstance(part, ImagePart) else part for part in message.content]
        return replace(message, content=tuple(parts))

    return tuple([changed(message) if message.images else message for message in messages])


def images_in(messages: Iterable[Message]) -> tuple[ImagePart, ...]:
    """The images of messages, in order."""
    return tuple([image for message in messages for image in message.images])


def refuse_images(messages: Iterable[Message], reader: str) -> None:
    """Raise `InvalidStep` for a message with an image, which the `reader` (`a reward model`) does not take."""
    if images_in(messages):
        raise InvalidStep(f"a message has an image, and {reader} takes text alone: leave images out")


def _parsed(value: Any, tool: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"the arguments of {tool} are not JSON: {error.msg} at column {error.colno}") from None


OLD_MARKS = ("$tuple", "$items")
"""Keys with which an earlier version wrote tuples, and mappings whose keys are no text."""


def check_json(value: Any, name: str) -> None:
    """Raise `ValueError` for a value that JSON would silently change: it has no tuples, and its keys are text. Other
    objects (a date) are not refused: where they are written, they become text.

    `name` is the value's, for the message."""
    if isinstance(value, str):  # the usual case
        return
    if isinstance(value, tuple):
        raise ValueError(f"{name} holds a tuple, {value!r:.60}, which JSON does not have: write a list")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name} holds the key {key!r:.60}, and keys are text in JSON: write it as text")
            if key in OLD_MARKS:
                raise ValueError(f"{name} holds a {key}, which only earlier versions of envgym write and read")
            check_json(item, name)
    elif isinstance(value, list):
        for item in value:
            check_json(item, name)


@dataclass(frozen=True, slots=True)
class Task:
    """One problem, as data.

    `id` is unique within its task set; `prompt` is plain text or messages; `answer` is the reference answer; `fields`
    holds the row's other columns; `difficulty` has any scale; `seed` is the reset seed of environments that generate
    their problems; `env` is the member of a mixture that poses it.

    Tasks are saved and sent as JSON. Raises `ValueError` for a tuple or a key that is no text in `answer` and `fields`.
    """

    id: str
    prompt: str | tuple[Message, ...] = ""
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    difficulty: float | None = None
    seed: int | None = None
    env: str = ""

    def __post_init__(self) -> None:
        check_json(self.answer, f"the answer of task {self.id}")
        check_json(self.fields, f"fields of task {self.id}")

    @property
    def key(self) -> str:
        """The id within a run, unique also among the members of a mixture."""
        return f"{self.env}/{self.id}" if self.env else self.id


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's message to the policy: chat `messages`, or raw `text` (for base models, without a template).

    `Observation("text")` is raw text; messages may be one message or a list, and mappings become `Message`. `images`
    are those of raw text, in the order of the marks for them that the text has, such as `<|image_pad|>`.
    `sampling` overrides fields of the next turn's sampling parameters (`{"max_tokens": 64}`), within the limits of a
    run's settings; its `stop` is a text, and the turn ends with the first token that contains it. `tools` are declared
    with an episode's first observation and hold for the whole episode.

    Raises `TypeError` for anything else.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    sampling: Mapping[str, Any] | None = None
    tools: tuple[ToolSpec, ...] = ()
    images: tuple[ImagePart, ...] = ()

    if TYPE_CHECKING:  # `__post_init__` converts these wider types

        def __init__(
            self, messages: str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]] = (),
            text: str | None = None, sampling: Mapping[str, Any] | None = None, tools: tuple[ToolSpec, ...] = (),
            images: tuple[ImagePart, ...] = (),
        ) -> None: ...  # fmt: skip

    def __post_init__(self) -> None:
        messages: Any = self.messages
        if isinstance(messages, str) and self.text is None:
            object.__setattr__(self, "text", messages)
            messages = ()
        if not isinstance(messages, Sequence | Message | Mapping):
            raise TypeError(f"an observation is text, messages or an Observation, not {type(messages).__name__}")
        if not isinstance(self.text, str | None):
            raise TypeError(f"the text of an observation is a string, not {type(self.text).__name__}")
        if self.images and self.text is None:
            raise TypeError("an observation's images are those of its raw text: put those of messages into these")
        object.__setattr__(self, "messages", as_messages(messages))

    @property
    def has_images(self) -> bool:
        """True if its messages or its raw text have images."""
        return bool(self.images or images_in(self.messages))

    @property
    def n_characters(self) -> int:
        """Number of characters of its text and messages, and of tools, calls and sampling parameters as text."""
        extras = (self.sampling, self.tools, *(message.tool_calls for message in self.messages))
        size = len(self.text or "") + sum(len(str(extra)) for extra in extras if extra)
        return size + sum(len(message.text) + len(message.role) for message in self.messages)


MAX_CHARACTERS = 4_000_000
"""Maximum characters of an observation, with its tools and sampling parameters. A longer one fits no context, and would
stall the tokenizer."""


def as_observation(value: Any, source: str) -> Observation:
    """Convert a return value of the environment `source`: an `Observation`, raw text, messages, or None.

    Raises `InvalidStep` for anything else, and for more than `MAX_CHARACTERS`.
    """
    try:
        observation = value if isinstance(value, Observation) else Observation(() if value is None else value)
    except (TypeError, ValueError) as error:
        is_late = isinstance(error, TypeError) and coroutines_in(value)
        problem = f"an observation is text, messages or an Observation, not {describe(value)}" if is_late else error
        raise InvalidStep(f"{source}: {problem}") from None
    if (size := observation.n_characters) > MAX_CHARACTERS:
        raise InvalidStep(
            f"{source}: an observation has {size:,} characters, more than the {MAX_CHARACTERS:,} that are rendered: "
            "show the policy a part of it"
        )
    return observation


def observed_messages(observation: Observation) -> tuple[Message, ...]:
    """An observation as messages; raw text becomes a user message, with its images after it."""
    return (Message("user", (observation.text, *observation.images)),) if observation.text else observation.messages


class StopReason(StrEnum):
    """Reason why the policy's turn ended."""

    STOP = "stop"
    """The model ended its turn (end-of-turn token or stop string)."""
    LENGTH = "length"
    """The turn's or the episode's token budget ran out."""


def int_array(values: Iterable[int]) -> array[int]:
    """Token ids as an int32 array: `values` itself if it is one. Raises `ValueError` for a number beyond int32."""
    if isinstance(values, array) and values.typecode == "i":
        return values
    try:
        return array("i", list(values) if isinstance(values, bytes) else values)  # `array` reads bytes as memory
    except OverflowError:
        raise ValueError("a token id does not fit into 32 bits") from None


class _AsList:
    """Tells pydantic to write token ids to JSON as a list of numbers."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        to_list = core_schema.plain_serializer_function_ser_schema(list)
        return core_schema.list_schema(core_schema.int_schema(), serialization=to_list)


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy.

    `text` has no special tokens, except the markup of tool calls. `token_ids` [T] are the exact ids (int32; any
    iterable is accepted; empty if the engine returns none). `content` is the text outside the calls; None if the agent
    cannot separate it from their markup.
    """

    text: str
    token_ids: Annotated[Sequence[int], _AsList] = field(default_factory=lambda: array("i"))
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: StopReason = StopReason.STOP
    content: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", int_array(self.token_ids))


def as_action(value: Action | str) -> Action:
    """An action, which may be given as text. Raises `TypeError` for anything else."""
    if not isinstance(value, Action | str):
        raise TypeError(f"an action is text or an Action, not {value!r:.80}")
    return Action(value) if isinstance(value, str) else value
