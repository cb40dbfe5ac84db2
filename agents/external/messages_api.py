"""Anthropic's messages on the wire: a request, and its answer whole or as events.

Source: the public API reference of messages. `return_token_ids` is the extension of chat completions.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from envgym.types import ImagePart, Message, StopReason, ToolCall, ToolSpec

from .chat_api import EXHAUSTED, TOKEN_FIELDS, Body, PolicyRequest, Refusal, check_settings
from .conversation import PolicyAnswer

REFUSED: dict[str, tuple[Any, ...]] = {
    "output_format": (None,),
    "mcp_servers": (None, []),
    "container": (None,),
}
"""Settings that would change the policy's prompts or answers, and the accepted values of each, which do not."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Kinds of `tool_choice`, and their names in chat completions."""
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
"""Types of errors by their HTTP status; the others are `invalid_request_error`."""


# -- parsing ----------------------------------------------------------------------------------------------


def messages_of(messages: Any, system: Any = None) -> tuple[Message, ...]:
    """The messages of a request's `messages` and `system`. A user's message with results of tools becomes one message
    per result and per text between them. Thoughts are dropped: the policy does not read them again.

    Raises `TypeError`, whose message names the place.
    """
    if not isinstance(messages, list) or not messages:
        raise TypeError("messages is a list of at least one message")
    result = [Message("system", _parts(system, "system", has_images=False))] if system else []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise TypeError(f"{place}: a message's role is user or assistant")
        parts: list[str | ImagePart] = []
        calls: list[ToolCall] = []
        for block, label in _blocks(message.get("content"), f"{place}.content"):
            match message["role"], block.get("type"):
                case _, "text":
                    parts.append(_text(block, "text", label))
                case "user", "image":
                    parts.append(_image(block, label))
                case "assistant", "tool_use":
                    calls.append(_call(block, label))
                    names[calls[-1].id] = calls[-1].name
                case "assistant", "thinking" | "redacted_thinking":
                    pass
                case "user", "tool_result":
                    if parts:
                        result.append(Message("user", parts))
                        parts = []
                    id, content = _text(block, "tool_use_id", label), _parts(block.get("content") or "", label)
                    result.append(Message("tool", content, tool_call_id=id, name=names.get(id, "")))
                case role, kind:
                    raise TypeError(f"{label}: a block of type {kind!r:.40} of the {role} cannot be read: use text")
        if message["role"] == "assistant":
            result.append(Message("assistant", parts, tuple(calls)))
        elif parts or not message["content"]:
            result.append(Message("user", parts))
    if result[-1].role == "assistant":
        raise TypeError("the last message is the assistant's, and no answer can begin with it: end with a user's")
    return tuple(result)


def _blocks(content: Any, place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The blocks of a content, which is text or a list of blocks, with their places."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise TypeError(f"{place} is text or a list of blocks, not {type(content).__name__}")
    for index, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise TypeError(f"{place}.{index} is a block, not {type(block).__name__}")
        yield block, f"{place}.{index}"


def _parts(content: Any, place: str, *, has_images: bool = True) -> list[str | ImagePart]:
    """The texts and images of a content without other blocks."""
    parts: list[str | ImagePart] = []
    for block, label in _blocks(content, place):
        if block.get("type") == "image" and has_images:
            parts.append(_image(block, label))
            continue
        if block.get("type") != "text":
            raise TypeError(f"{label}: a block of type {block.get('type')!r:.40} cannot be read: use text")
        parts.append(_text(block, "text", label))
    return parts


def _image(block: Mapping[str, Any], place: str) -> ImagePart:
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise TypeError(f"{place}.source: an image is in the request, as base64: nothing is fetched")
    try:
        return ImagePart.from_value(f"data:;base64,{_text(source, 'data', f'{place}.source')}")
    except ValueError as error:
        raise TypeError(f"{place}.source: {error}") from None


def _text(block: Mapping[str, Any], key: str, place: str) -> str:
    if not isinstance(value := block.get(key), str):
        raise TypeError(f"{place}.{key} is text, not {type(value).__name__}")
    return value


def _call(block: Mapping[str, Any], place: str) -> ToolCall:
    if not isinstance(arguments := block.get("input"), Mapping):
        raise TypeError(f"{place}.input is an object, not {type(arguments).__name__}")
    return ToolCall(_text(block, "id", place), _text(block, "name", place), arguments)


def tools_of(tools: Any) -> tuple[ToolSpec, ...]:
    """The tools of a request. Raises `TypeError`, also for the provider's own tools."""
    specs = []
    for tool, place in _blocks(tools or [], "tools"):
        if tool.get("type") not in (None, "custom"):
            raise TypeError(f"{place}: one is {tool['type']!r:.40}, and only tools with an input_schema can be offered")
        if not isinstance(schema := tool.get("input_schema"), Mapping):
            raise TypeError(f"{place}.input_schema is an object, not {type(schema).__name__}")
        specs.append(ToolSpec(_text(tool, "name", place), str(tool.get("description") or ""), schema))
    return tuple(specs)


# -- requests ---------------------------------------------------------------------------------------------


class MessagesRequest(PolicyRequest):
    """A request for a message."""

    @classmethod
    def parse(cls, body: Any) -> MessagesRequest:
        """Parse a body. Raises a `Refusal` if it is malformed or asks for something unsupported."""
        check_settings(body, REFUSED)
        config = body.get("output_config")
        if isinstance(config, Mapping) and config.get("format") is not None:
            raise Refusal(400, "'output_config.format' cannot be set: leave it out")
        tool_choice = body.get("tool_choice") or {"type": "auto"}
        choice = CHOICES.get(str(tool_choice.get("type"))) if isinstance(tool_choice, Mapping) else None
        if choice is None:
            raise Refusal(400, f"'tool_choice' cannot be {json.dumps(tool_choice)[:60]}: use auto, any or none")
        if body.get("max_tokens") is None:
            raise Refusal(400, "max_tokens is missing")
        try:
            messages, tools = messages_of(body.get("messages"), body.get("system")), tools_of(body.get("tools"))
        except TypeError as error:
            raise Refusal(400, str(error)) from None
        return cls.from_body(body, messages, tools, "max_tokens", body.get("stop_sequences"), choice)

    @staticmethod
    def error_body(refusal: Refusal) -> Body:
        error = {"type": ERRORS.get(refusal.status, "invalid_request_error"), "message": str(refusal)}
        return {"type": "error", "error": error}

    def answer(self, answer: PolicyAnswer) -> Body | Iterator[Body]:
        """The message, or its events if a stream is requested."""
        turn, generation, context, ending = answer
        blocks: list[Body] = [{"type": "text", "text": turn.text}] if turn.text else []
        for call in turn.tool_calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
        reason = "tool_use" if turn.tool_calls else "end_turn" if ending is None else "stop_sequence"
        if generation.stop_reason is StopReason.LENGTH:
            reason = "max_tokens"
        message: Body = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": str(self.body.get("model") or "policy"),
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": ending if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": len(context),
                "output_tokens": len(generation.token_ids),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }
        if self.body.get("return_token_ids"):
            values: Sequence[Any] = (context, list(generation.token_ids), list(generation.logprobs))
            message |= zip(TOKEN_FIELDS, values, strict=True)
        return self._events(message) if self.body.get("stream") else message

    def out_of_budget(self, reason: str) -> NoReturn:
        """Raise the `Refusal` of a request for which no token can be sampled, in the words that programs search."""
        raise Refusal(400, f"prompt is too long: {EXHAUSTED[reason]}")

    def _events(self, message: Body) -> Iterator[Body]:
        """The message as a stream: the policy's turn is sampled in one call, so each block is one delta."""
        usage, ending = message["usage"], {name: message[name] for name in ("stop_reason", "stop_sequence")}
        start: Body = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "output_tokens": 0},
        }
        yield {"type": "message_start", "message": {**message, **start}}
        for index, block in enumerate(message["content"]):
            opening: Body
            delta: Body
            if block["type"] == "text":
                opening, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                opening, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": index, "content_block": {**block, **opening}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": usage["output_tokens"]}}
        yield {"type": "message_stop"}
