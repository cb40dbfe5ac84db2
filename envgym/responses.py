"""Objects of the OpenAI Responses API as plain dictionaries: input items, tools, and whole `Response` objects.

Written after the public API reference. `prompt_token_ids`, `generation_token_ids` and `generation_log_probs` on an
output item are an extension that trainers and agent servers of other frameworks know: the last item of each model
call has them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .types import Message, TextPart, ToolCall, ToolSpec

Item = dict[str, Any]

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The token fields of an output item: all three are there, or none."""
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of the API's messages, and ours. To a chat template a developer is the system."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Kinds of content part that are text, and the key it stands under."""


class MalformedItem(ValueError):
    """An item or a tool that is not as the API has it, or that cannot be said in text; the message says which."""


# -- theirs to ours ---------------------------------------------------------------------------------------


def messages_of(input: Any, instructions: Any = None) -> tuple[Message, ...]:
    """The messages that a request's `input` (text, or a list of items) and `instructions` say.

    Calls join the assistant's message right before them, as one turn. Reasoning is left out: it is not said to the
    policy again. Raises `MalformedItem`.
    """
    if not (instructions is None or isinstance(instructions, str)):
        raise MalformedItem(f"instructions are text, not {_kind(instructions)}")
    messages = [Message.of("system", instructions)] if instructions else []
    if isinstance(input, str):
        return (*messages, Message.of("user", input))
    if not isinstance(input, Sequence):
        raise MalformedItem(f"input is text or a list of items, not {_kind(input)}")
    names: dict[str, str] = {}
    for index, item in enumerate(input):
        where = f"input item {index}"
        if not isinstance(item, Mapping):
            raise MalformedItem(f"{where} is an object, not {_kind(item)}")
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                call = call_of(item, where)
                names[call.id] = call.name
                if messages and messages[-1].role == "assistant":
                    messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
                else:
                    messages.append(Message("assistant", (), (call,)))
            case "function_call_output":
                id = _text(item, "call_id", where)
                result = _content(item.get("output"), where)
                messages.append(Message("tool", result, tool_call_id=id, name=names.get(id, "")))
            case "reasoning":
                pass
            case other:
                raise MalformedItem(f"{where} is of the type {other!r:.40}, which is not text, a call or its result")
    return tuple(messages)


def call_of(item: Mapping[str, Any], where: str = "a function_call") -> ToolCall:
    """The tool call that a `function_call` item is. Raises `MalformedItem`, also for arguments that are no object."""
    try:
        arguments = json.loads(item.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = None
    if not isinstance(arguments, dict):
        raise MalformedItem(f"{where}: arguments are a JSON object as text, not {item.get('arguments')!r:.60}")
    return ToolCall(_text(item, "call_id", where), _text(item, "name", where), arguments)


def tools_of(tools: Any) -> tuple[ToolSpec, ...]:
    """The function tools of a request. Raises `MalformedItem`, also for tools of other kinds (hosted ones)."""
    if tools is None:
        return ()
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise MalformedItem(f"tools is a list, not {_kind(tools)}")
    return tuple(_tool(tool, f"tool {index}") for index, tool in enumerate(tools))


def _tool(tool: Any, where: str) -> ToolSpec:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise MalformedItem(f"{where} is {kind!r:.40}, and only function tools can be offered")
    parameters = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise MalformedItem(f"{where}: parameters are a JSON schema, not {_kind(parameters)}")
    return ToolSpec(_text(tool, "name", where), str(tool.get("description") or ""), parameters)


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MalformedItem(f"{where}: a message's role is one of {', '.join(ROLES)}, not {role!r:.40}")
    return Message(ROLES[role], _content(item.get("content"), where))


def _content(content: Any, where: str) -> tuple[TextPart, ...]:
    """The text of a message or a result: text itself, or a list of parts."""
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, Sequence):
        raise MalformedItem(f"{where}: content is text or a list of parts, not {_kind(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise MalformedItem(f"{where}: content of the type {kind!r:.40} is no text, and only text can be said")
        texts.append(TextPart(_text(part, TEXT_PARTS[kind], where)))
    return tuple(texts)


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise MalformedItem(f"{where}: {key!r} is text, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# -- ours to theirs ---------------------------------------------------------------------------------------


def input_items(messages: Sequence[Message]) -> list[Item]:
    """The items that say `messages` in a request; `messages_of` reads them back."""
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
    """The items of an assistant's turn: a message where it says something or calls nothing, then its calls.

    A call that cannot be read has no form in the API: it is left out, and what was said of it belongs to the text.
    """
    items: list[Item] = []
    calls = [call for call in message.tool_calls if not call.error]
    if message.text or not calls:
        part = {"type": "output_text", "text": message.text, "annotations": []}
        items.append(
            {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": [part]}
        )
    for call in calls:
        arguments = json.dumps(dict(call.arguments))
        items.append(
            {"type": "function_call", "id": _id("fc"), "call_id": call.id or _id("call"), "name": call.name,
             "arguments": arguments, "status": "completed"}
        )  # fmt: skip
    return items


def result_item(message: Message) -> Item:
    """The `function_call_output` that a tool's message is."""
    return {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}


def with_tokens(
    items: Sequence[Item],
    prompt_token_ids: Sequence[int],
    generation_token_ids: Sequence[int],
    log_probs: Sequence[float],
) -> list[Item]:
    """The items of one model call with its tokens on the last: what it was sampled after [P], what was sampled [T],
    and its log-probabilities [T] in nats. Raises `ValueError` where the lengths differ or there is no item."""
    if len(generation_token_ids) != len(log_probs):
        raise ValueError(f"{len(log_probs)} log-probabilities for {len(generation_token_ids)} tokens")
    if not items:
        raise ValueError("tokens belong to an item, and the call has none")
    values = ([int(t) for t in prompt_token_ids], [int(t) for t in generation_token_ids], [float(p) for p in log_probs])
    return [*items[:-1], {**items[-1], **dict(zip(TOKEN_FIELDS, values, strict=True))}]


def tool_items(tools: Sequence[ToolSpec]) -> list[Item]:
    """The tools as a request and a `Response` have them; `tools_of` reads them back."""
    return [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters),
         "strict": False}
        for tool in tools
    ]  # fmt: skip


def usage(input_tokens: int, output_tokens: int) -> Item:
    """What a response says of the tokens it took."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def response(
    output: Sequence[Mapping[str, Any]],
    *,
    model: str = "policy",
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: Any = "auto",
    parallel_tool_calls: bool = True,
    cut: bool = False,
    usage: Mapping[str, Any] | None = None,
    **more: Any,
) -> Item:
    """A whole `Response` of the items in `output`, with every field the API requires.

    `cut` says that a token limit ended it: then it is `incomplete`. `more` are further fields, such as `metadata`.
    """
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [dict(item) for item in output],
        "parallel_tool_calls": parallel_tool_calls,
        "tool_choice": tool_choice,
        "tools": [dict(tool) for tool in tools],
        "usage": None if usage is None else dict(usage),
        **more,
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
