"""The OpenAI Responses API on the wire: parsing of input items, tools and requests; items and `Response` objects.

Source: the public API reference of responses. The token fields on an output item are an extension that trainers and
agent servers of other frameworks use: the last item of each model call has them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.engine import Generation
from envgym.types import Message, StopReason, TextPart, ToolCall, ToolSpec

from .chat_api import TOKEN_FIELDS, PolicyRequest, check_settings, refusal

Item = dict[str, Any]
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of the API's messages, and the chat template's role for each: a developer is the system."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content part that are text, and the key of the text."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "tool_choice": (None, "auto", "none", "required"),  # turns without a call are counted for `required`
}
"""Settings that would change the policy's prompts or answers, and the accepted values of each, which do not."""
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "reasoning",
    "service_tier", "text", "tool_choice", "truncation", "user",
)  # fmt: skip
"""Fields of a request that its `Response` repeats. Sampling parameters are not among them: the run's apply."""


class MalformedItem(ValueError):
    """An item or a tool that does not match the API, or that is not text; the message names it."""


# -- parsing ----------------------------------------------------------------------------------------------


def messages_of(input: Any, instructions: Any = None) -> tuple[Message, ...]:
    """The messages of a request's `input` (text, or a list of items) and `instructions`.

    Calls join the directly preceding assistant message, as one turn. Reasoning is dropped: the policy does not read
    it again. Raises `MalformedItem`.
    """
    if not (instructions is None or isinstance(instructions, str)):
        raise MalformedItem(f"instructions are text, not {_kind(instructions)}")
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(input, str):
        return (*messages, Message("user", input))
    if not isinstance(input, Sequence):
        raise MalformedItem(f"input is text or a list of items, not {_kind(input)}")
    names: dict[str, str] = {}
    for index, item in enumerate(input):
        label = f"input item {index}"
        if not isinstance(item, Mapping):
            raise MalformedItem(f"{label} is an object, not {_kind(item)}")
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if not isinstance(role, str) or role not in ROLES:
                    raise MalformedItem(f"{label}: a message's role is one of {', '.join(ROLES)}, not {role!r:.40}")
                messages.append(Message(ROLES[role], _content(item.get("content"), label)))
            case "function_call":
                call = call_of(item, label)
                names[call.id] = call.name
                if messages and messages[-1].role == "assistant":
                    messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
                else:
                    messages.append(Message("assistant", (), (call,)))
            case "function_call_output":
                id = _text(item, "call_id", label)
                result = _content(item.get("output"), label)
                messages.append(Message("tool", result, tool_call_id=id, name=names.get(id, "")))
            case "reasoning":
                pass
            case kind:
                raise MalformedItem(f"{label} is of the type {kind!r:.40}, which is not text, a call or its result")
    return tuple(messages)


def call_of(item: Mapping[str, Any], label: str = "a function_call") -> ToolCall:
    """The tool call of a `function_call` item. Raises `MalformedItem`, also for arguments that are no object."""
    try:
        arguments = json.loads(item.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        raise MalformedItem(f"{label}: arguments are a JSON object as text, not {item.get('arguments')!r:.60}")
    return ToolCall(_text(item, "call_id", label), _text(item, "name", label), arguments)


def tools_of(tools: Any) -> tuple[ToolSpec, ...]:
    """The function tools of a request. Raises `MalformedItem`, also for tools of other kinds (hosted ones)."""
    if tools is None:
        return ()
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise MalformedItem(f"tools is a list, not {_kind(tools)}")
    return tuple(_tool(tool, f"tool {index}") for index, tool in enumerate(tools))


def _tool(tool: Any, label: str) -> ToolSpec:
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if not isinstance(tool, Mapping) or kind != "function":
        raise MalformedItem(f"{label} is {kind!r:.40}, and only function tools can be offered")
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise MalformedItem(f"{label}: parameters are a JSON schema, not {_kind(parameters)}")
    return ToolSpec(_text(tool, "name", label), str(tool.get("description") or ""), parameters)


def _content(content: Any, label: str) -> tuple[TextPart, ...]:
    """The text of a message or a result: text itself, or a list of parts."""
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, Sequence):
        raise MalformedItem(f"{label}: content is text or a list of parts, not {_kind(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise MalformedItem(f"{label}: content of the type {kind!r:.40} is no text, and only text is read")
        texts.append(TextPart(_text(part, TEXT_PARTS[kind], label)))
    return tuple(texts)


def _text(item: Mapping[str, Any], key: str, label: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise MalformedItem(f"{label}: {key!r} is text, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# -- building ---------------------------------------------------------------------------------------------


def input_items(messages: Sequence[Message]) -> list[Item]:
    """The items of `messages` in a request; `messages_of` reads them back."""
    items: list[Item] = []
    for message in messages:
        if message.role == "assistant":
            items += output_items(message)
        elif message.role == "tool":
            items.append(result_item(message))
        else:
            items.append({"type": "message", "role": message.role, "content": message.text})
    return items


def output_items(message: Message) -> list[Item]:
    """The items of an assistant's turn: a message if it has text or no calls, then its calls.

    A malformed call has no form in the API, so it is omitted; the message's text already contains its words.
    """
    items: list[Item] = []
    calls = [call for call in message.tool_calls if not call.error]
    if message.text or not calls:
        text = [{"type": "output_text", "text": message.text, "annotations": []}]
        items.append({"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": text})
    for call in calls:
        arguments = json.dumps(dict(call.arguments))
        items.append(
            {"type": "function_call", "id": _id("fc"), "call_id": call.id or _id("call"), "name": call.name,
             "arguments": arguments, "status": "completed"}
        )  # fmt: skip
    return items


def result_item(message: Message) -> Item:
    """The `function_call_output` of a tool's message."""
    return {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}


def with_tokens(
    items: Sequence[Item], prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float]
) -> list[Item]:
    """The items of one model call with its tokens on the last item: prompt [P], sampled tokens [T], and their
    log-probabilities [T] in nats."""
    values = ([int(t) for t in prompt], [int(t) for t in sampled], [float(p) for p in logprobs])
    return [*items[:-1], {**items[-1], **dict(zip(TOKEN_FIELDS, values, strict=True))}]


def tool_items(tools: Sequence[ToolSpec]) -> list[Item]:
    """The tools in the form of a request and a `Response`; `tools_of` reads them back."""
    return [{"type": "function", **tool.as_dict()["function"], "strict": False} for tool in tools]


def usage(input_tokens: int, output_tokens: int) -> Item:
    """The `usage` of a response."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def response(output: Sequence[Item], *, truncated: bool = False, **fields: Any) -> Item:
    """A whole `Response` of the items in `output`, with every field the API requires.

    `truncated`: a token limit ended it, so it is `incomplete`. `fields` override the default fields.
    """
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if truncated else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "instructions": None,
        "metadata": {},
        "model": "policy",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
        **fields,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


# -- requests ---------------------------------------------------------------------------------------------


class ResponsesRequest(PolicyRequest):
    """A request for a `Response`."""

    @classmethod
    def parse(cls, body: Any) -> ResponsesRequest:
        """Parse a body. Raises a `refusal` if it is malformed or asks for something unsupported."""
        check_settings(body, REFUSED)
        text = body.get("text")
        form = text.get("format") if isinstance(text, Mapping) else text
        if form not in (None, {"type": "text"}):
            raise refusal(400, f"the text's format cannot be {json.dumps(form)[:60]}: leave it out")
        try:
            messages = messages_of(body.get("input"), body.get("instructions"))
            tools = tools_of(body.get("tools"))
        except MalformedItem as error:
            raise refusal(400, str(error)) from None
        if not messages:
            raise refusal(400, "input is text or a list of at least one item")
        return cls.from_body(body, messages, tools, body.get("max_output_tokens"), "max_output_tokens")

    def answer(self, message: Message, generation: Generation, context: list[int]) -> Item:
        """The `Response` with the message, and the exact tokens on its last item."""
        items = with_tokens(output_items(message), context, generation.token_ids, generation.logprobs)
        truncated = generation.stop_reason is StopReason.LENGTH
        return self._response(items, truncated, usage(len(context), len(generation.token_ids)))

    def out_of_budget(self, reason: str) -> Item:
        """The empty, incomplete `Response` once no token can be sampled, whatever the reason. It ends a program's loop
        like a truncated answer; an error might crash it."""
        return self._response(output_items(Message("assistant", "")), True, usage(0, 0))

    def _response(self, items: list[Item], truncated: bool, usage: Item) -> Item:
        if truncated:
            items = [{**item, "status": "incomplete"} for item in items]
        echoed = {name: self.body[name] for name in ECHOED if self.body.get(name) is not None}
        echoed |= {"model": str(self.body.get("model") or "policy"), "tools": self.body.get("tools") or []}
        return response(items, truncated=truncated, usage=usage, **echoed)
