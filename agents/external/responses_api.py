"""The OpenAI Responses API on the wire: parsing of input items, tools and requests; items and `Response` objects.

Source: the public API reference of responses. The token fields on an output item are an extension that trainers and
agent servers of other frameworks use: the last item of each model call has them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.types import ImagePart, Message, StopReason, ToolCall, ToolSpec
from envgym.types.conversations import parts_of

from .chat_api import TOKEN_FIELDS, PolicyRequest, Refusal, check_settings
from .conversation import PolicyAnswer

Item = dict[str, Any]
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of the API's messages, and the chat template's role for each: a developer is the system."""
REFUSED: dict[str, tuple[Any, ...]] = {
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
    """An item or a tool that does not match the API, or that is neither text nor an image in the request; the message
    names it."""


# -- parsing ----------------------------------------------------------------------------------------------


def messages_of(input: Any, instructions: Any = None) -> tuple[Message, ...]:
    """The messages of a request's `input` (text, or a list of items) and `instructions`.

    Calls join the directly preceding assistant message, as one turn. Reasoning is dropped: the policy does not read
    it again. Raises `MalformedItem`.
    """
    if not isinstance(instructions, str | None):
        raise MalformedItem(f"instructions are text, not {type(instructions).__name__}")
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(input, str):
        return (*messages, Message("user", input))
    if not isinstance(input, Sequence):
        raise MalformedItem(f"input is text or a list of items, not {type(input).__name__}")
    names: dict[str, str] = {}
    for index, item in enumerate(input):
        with _reading(f"input item {index}"):
            match item.get("type", "message"):
                case "message":
                    if (role := item.get("role")) not in ROLES:
                        raise TypeError(f"a message's role is one of {', '.join(ROLES)}, not {role!r:.40}")
                    messages.append(Message(ROLES[role], _parts(item.get("content"))))
                case "function_call":
                    call = call_of(item)
                    names[call.id] = call.name
                    if messages and messages[-1].role == "assistant":
                        messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
                    else:
                        messages.append(Message("assistant", (), (call,)))
                case "function_call_output":
                    id, parts = _text(item, "call_id"), _parts(item.get("output"))
                    messages.append(Message("tool", parts, tool_call_id=id, name=names.get(id, "")))
                case "reasoning":
                    pass
                case kind:
                    raise TypeError(f"the type {kind!r:.40} is no message, call or result")
    return tuple(messages)


def call_of(item: Mapping[str, Any]) -> ToolCall:
    """The tool call of a `function_call` item. Raises `MalformedItem`, also for arguments that are no object."""
    with _reading("a function_call"):
        arguments = json.loads(item.get("arguments") or "{}")
        if not isinstance(arguments, dict):
            raise TypeError(f"arguments are a JSON object as text, not {item.get('arguments')!r:.60}")
        return ToolCall(_text(item, "call_id"), _text(item, "name"), arguments)


def tools_of(tools: Any) -> tuple[ToolSpec, ...]:
    """The function tools of a request. Raises `MalformedItem`, also for tools of other kinds (hosted ones)."""
    with _reading("tools"):
        return tuple(map(_tool, tools or ()))


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    if tool.get("type") != "function":
        raise TypeError(f"one is {tool.get('type')!r:.40}, and only function tools can be offered")
    parameters = {"type": "object", "properties": {}} if tool.get("parameters") is None else dict(tool["parameters"])
    return ToolSpec(_text(tool, "name"), str(tool.get("description") or ""), parameters)


def _parts(content: Any) -> list[str | ImagePart]:
    """The texts and images of a message or a result. Raises `TypeError` for other parts, and `ValueError` for an image
    that is not in the request."""
    if isinstance(content, list):
        content = [part.get("refusal", part) if isinstance(part, Mapping) else part for part in content]
    return parts_of(content)


def _text(item: Mapping[str, Any], key: str) -> str:
    if not isinstance(value := item.get(key), str):
        raise TypeError(f"{key!r} is text, not {type(value).__name__}")
    return value


@contextlib.contextmanager
def _reading(label: str) -> Iterator[None]:
    """Raise `MalformedItem`, whose message begins with `label`, for what the block cannot read."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedItem(f"{label}: {error}") from None


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
            items.append({"type": "message", "role": message.role, "content": _content(message)})
    return items


def _content(message: Message) -> str | list[Item]:
    """The content of a message: its text or, with images, its parts."""
    if not message.images:
        return message.text
    return [
        {"type": "input_image", "image_url": part.data_uri(), "detail": "auto"}
        if isinstance(part, ImagePart)
        else {"type": "input_text", "text": part.text}
        for part in message.content
    ]


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
    return {"type": "function_call_output", "call_id": message.tool_call_id, "output": _content(message)}


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


def _events(finished: Item) -> Iterator[Item]:
    """A `Response` as the events of a stream. Each text and each call is one delta."""
    created = {**finished, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": created}
    yield {"type": "response.in_progress", "response": created}
    for index, item in enumerate(finished["output"]):
        place = {"item_id": item["id"], "output_index": index}
        opening = {key: value for key, value in item.items() if key not in TOKEN_FIELDS} | {"status": "in_progress"}
        if item["type"] == "message":
            [part] = item["content"]
            place["content_index"] = 0
            yield {"type": "response.output_item.added", "output_index": index, "item": {**opening, "content": []}}
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            name, arguments = item["name"], item["arguments"]
            yield {"type": "response.output_item.added", "output_index": index, "item": {**opening, "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{finished['status']}", "response": finished}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


# -- requests ---------------------------------------------------------------------------------------------


class ResponsesRequest(PolicyRequest):
    """A request for a `Response`."""

    @classmethod
    def parse(cls, body: Any) -> ResponsesRequest:
        """Parse a body. Raises a `Refusal` if it is malformed or asks for something unsupported."""
        check_settings(body, REFUSED)
        text = body.get("text")
        form = text.get("format") if isinstance(text, Mapping) else text
        if form not in (None, {"type": "text"}):
            raise Refusal(400, f"the text's format cannot be {json.dumps(form)[:60]}: leave it out")
        try:
            messages = messages_of(body.get("input"), body.get("instructions"))
            tools = tools_of(body.get("tools"))
        except MalformedItem as error:
            raise Refusal(400, str(error)) from None
        if not messages:
            raise Refusal(400, "input is text or a list of at least one item")
        return cls.from_body(body, messages, tools, "max_output_tokens", body.get("stop"), body.get("tool_choice"))

    def answer(self, answer: PolicyAnswer) -> Item | Iterator[Item]:
        """The `Response` with the message, and the exact tokens on its last item; its events if a stream is
        requested."""
        message, generation, context, _ = answer
        items = with_tokens(output_items(message), context, generation.token_ids, generation.logprobs)
        truncated = generation.stop_reason is StopReason.LENGTH
        return self._response(items, truncated, usage(len(context), len(generation.token_ids)))

    def out_of_budget(self, reason: str) -> Item | Iterator[Item]:
        """The empty, incomplete `Response` once no token can be sampled, whatever the reason. It ends a program's loop
        like a truncated answer; an error might crash it."""
        return self._response(output_items(Message("assistant", "")), True, usage(0, 0))

    def _response(self, items: list[Item], truncated: bool, usage: Item) -> Item | Iterator[Item]:
        if truncated:
            items = [{**item, "status": "incomplete"} for item in items]
        echoed = {name: self.body[name] for name in ECHOED if self.body.get(name) is not None}
        echoed |= {"model": str(self.body.get("model") or "policy"), "tools": self.body.get("tools") or []}
        answer = response(items, truncated=truncated, usage=usage, **echoed)
        if not self.body.get("stream"):
            return answer
        return ({**event, "sequence_number": number} for number, event in enumerate(_events(answer)))
