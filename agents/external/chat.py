"""OpenAI chat completions on the wire: a request's fields, an answer whole or in chunks, an error.

Source: the public API reference of chat completions; `return_token_ids` and its fields are vLLM's extension. So is
`return_tokens_as_token_ids`, by which NeMo-Gym's model server asks: it takes the tokens from the message where they are
there, and else asks vLLM to tokenize the messages again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from envgym.engines.base import Generation
from envgym.responses import TOKEN_FIELDS
from envgym.types import Message, StopReason, ToolSpec, as_messages

REFUSED: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "n": (None, 1),
    "logit_bias": (None, {}),
}
"""Settings that would change what the policy says, and the values of each that do not."""


class Refusal(Exception):
    """A request that is not answered, in the form of the API's errors."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> web.Response:
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return web.json_response({"error": error}, status=self.status)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. Temperature and top-p are the run's, whatever it says of them."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None
    stream: bool
    usage: bool
    logprobs: bool
    token_ids: bool
    token_fields: bool
    model: str


def parse(body: Any) -> Asked:
    """A request's body. Raises `Refusal` for what is malformed or cannot be done."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is a JSON object")
    for name, harmless in REFUSED.items():
        if body.get(name) not in harmless:
            raise Refusal(400, f"{name!r} cannot be {json.dumps(body[name])[:60]}: leave it out")
    try:
        messages = tuple(
            replace(message, role="system") if message.role == "developer" else message
            for message in as_messages(_with_thoughts(body["messages"]))
        )
        tools = tuple(_tool(tool) for tool in body.get("tools") or ())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal(400, f"malformed messages or tools: {type(error).__name__}: {error}") from None
    if not messages or isinstance(body["messages"], str):
        raise Refusal(400, "messages is a list of at least one message")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise Refusal(400, f"max_tokens is a whole number of at least 1, not {limit!r:.40}")
    options = body.get("stream_options") or {}
    return Asked(
        messages=messages,
        tools=() if body.get("tool_choice") == "none" else tools,
        max_tokens=limit,
        stream=bool(body.get("stream")),
        usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        token_fields=bool(body.get("return_tokens_as_token_ids")),
        model=str(body.get("model", "policy")),
    )


def _with_thoughts(messages: Any) -> Any:
    """The messages with the policy's thoughts where it said them: programs may take what is between the tags out of the
    text, and send it back beside it, as NeMo-Gym's vllm_model does."""
    return [_with_own_thoughts(message) for message in messages] if isinstance(messages, list) else messages


def _with_own_thoughts(message: Any) -> Any:
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    thoughts, content = message.get("reasoning_content") or message.get("reasoning"), message.get("content") or ""
    if not (thoughts and isinstance(thoughts, str) and isinstance(content, str)):
        return message
    return {**message, "content": f"<think>{thoughts}</think>{content}"}


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(str(function["name"]), str(function.get("description", "")), function.get("parameters") or {})


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: the message, what was sampled and after which tokens."""

    id: str
    created: int
    asked: Asked
    message: Message
    generation: Generation
    context: list[int]

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.message.text, "refusal": None}
        if self.message.tool_calls:
            message |= {"content": self.message.text or None, "tool_calls": self._calls()}
        if self.asked.token_fields:
            values = (self.context, list(self.generation.token_ids), list(self.generation.logprobs))
            message |= zip(TOKEN_FIELDS, values, strict=True)
        choice = self._choice() | {"message": message, "finish_reason": self._finish_reason}
        answer = self._envelope("chat.completion") | {"choices": [choice], "usage": self._usage()}
        return answer | ({"prompt_token_ids": self.context} if self.asked.token_ids else {})

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The same as a stream. The policy's turn is sampled whole, so its text is one chunk."""
        opening = self._envelope("chat.completion.chunk")
        if self.asked.token_ids:
            opening["prompt_token_ids"] = self.context
        yield self._chunk({"role": "assistant", "content": ""}) | opening
        if self.message.text:
            yield self._chunk({"content": self.message.text}, self._choice())
        for index, call in enumerate(self._calls()):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, {"finish_reason": self._finish_reason})
        if self.asked.usage:
            yield self._envelope("chat.completion.chunk") | {"choices": [], "usage": self._usage()}

    @property
    def _finish_reason(self) -> str:
        if self.generation.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _chunk(self, delta: dict[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **(extra or {})}
        return self._envelope("chat.completion.chunk") | {"choices": [choice]}

    def _choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if self.asked.logprobs:
            pairs = zip(self.generation.token_ids, self.generation.logprobs, strict=True)
            content: list[dict[str, Any]] = [
                {"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        if self.asked.token_ids:
            choice["token_ids"] = list(self.generation.token_ids)
        return choice

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in self.message.tool_calls
        ]

    def _usage(self) -> dict[str, int]:
        prompt, completion = len(self.context), len(self.generation.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
