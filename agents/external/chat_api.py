"""OpenAI chat completions on the wire: a request, and its answer whole or in chunks.

Source: the public API reference of chat completions; `return_token_ids` and its fields are vLLM's extension. So is
`return_tokens_as_token_ids`, by which NeMo-Gym's model server asks: it takes the tokens from the message where they are
there, and else asks vLLM to tokenize the messages again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

from aiohttp import web

from envgym.engine import Generation
from envgym.types import Message, StopReason, ToolSpec, as_messages

Body = dict[str, Any]
"""The JSON object of an answer, or of one of its chunks."""
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The token fields of a message or an output item: all three are present, or none."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none", "required"),  # turns without a call are counted for `required`
    "n": (None, 1),
    "logit_bias": (None, {}),
}
"""Settings that would change the policy's answers, and the accepted values of each, which do not."""
EXHAUSTED = {
    "context": "the model's context length is used up",
    "tokens": "the episode's max_tokens are used up",
    "time": "the episode's time in the engine is used up, as if by its max_tokens",
    "template": "the chat template accepts no further turn after the policy's last one, whatever the context length",
}
"""Reasons why no more tokens can be sampled. Programs search them for `context length` and `max_tokens`."""


def refusal(status: int, message: str, code: str = "invalid_request") -> web.HTTPException:
    """The exception that rejects a request, in the form of the API's errors."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    response = web.HTTPUnauthorized if status == 401 else web.HTTPBadRequest
    return response(text=json.dumps({"error": error}), content_type="application/json")


def check_settings(body: Any, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `refusal` if the body is no object, or if a setting has a value that is not among the harmless ones."""
    if not isinstance(body, Mapping):
        raise refusal(400, "the body is a JSON object")
    for name, values in harmless.items():
        if body.get(name) not in values:
            raise refusal(400, f"{name!r} cannot be {json.dumps(body[name])[:60]}: leave it out")


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request for the policy's next turn. Temperature and top-p are the run's, whatever the request sets."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None
    body: Mapping[str, Any]

    @classmethod
    def from_body(
        cls, body: Any, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], limit: Any, name: str
    ) -> Self:
        """Check `limit`, the maximum tokens of the answer, which setting `name` holds. Raises a `refusal`."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise refusal(400, f"{name} is a whole number of at least 1, not {limit!r:.40}")
        return cls(messages, () if body.get("tool_choice") == "none" else tools, limit, body)


class CompletionRequest(PolicyRequest):
    """A request for a chat completion."""

    @classmethod
    def parse(cls, body: Any) -> CompletionRequest:
        """Parse a body. Raises a `refusal` if it is malformed or asks for something unsupported."""
        check_settings(body, REFUSED)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise refusal(400, "messages is a list of at least one message")
        try:
            messages = tuple(
                replace(message, role="system") if message.role == "developer" else message
                for message in as_messages([_with_reasoning(message) for message in body["messages"]])
            )
            tools = tuple(_tool(tool) for tool in body.get("tools") or ())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise refusal(400, f"malformed messages or tools: {type(error).__name__}: {error}") from None
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        return cls.from_body(body, messages, tools, limit, "max_tokens")

    def answer(self, message: Message, generation: Generation, context: list[int]) -> Body | Iterator[Body]:
        """The completion, or its chunks if a stream is requested."""
        completion = Completion(self.body, message, generation, context)
        return completion.chunks() if self.body.get("stream") else completion.body()

    def out_of_budget(self, reason: str) -> NoReturn:
        """Raise the `refusal` of a request for which no token can be sampled."""
        raise refusal(400, EXHAUSTED[reason], "context_length_exceeded")


def _with_reasoning(message: Any) -> Any:
    """A message with the policy's reasoning back in its text: programs may move it from between the tags into a field,
    as NeMo-Gym's vllm_model does."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    reasoning, content = message.get("reasoning_content") or message.get("reasoning"), message.get("content") or ""
    if not (reasoning and isinstance(reasoning, str) and isinstance(content, str)):
        return message
    return {**message, "content": f"<think>{reasoning}</think>{content}"}


def _tool(tool: Mapping[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(str(function["name"]), str(function.get("description", "")), function.get("parameters") or {})


class Completion:
    """An answer to a request's `body`: the message, the sampled tokens and the prompt tokens."""

    def __init__(self, body: Mapping[str, Any], message: Message, generation: Generation, context: list[int]) -> None:
        self._body, self._message, self._generation, self._context = body, message, generation, context
        self._calls = message.as_dict(arguments_as_text=True).get("tool_calls", [])
        self._finish_reason = "tool_calls" if message.tool_calls else "stop"
        if generation.stop_reason is StopReason.LENGTH:
            self._finish_reason = "length"
        prompt, completion = len(context), len(generation.token_ids)
        self._usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        self._envelope = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "created": int(time.time()),
            "model": str(body.get("model", "policy")),
        }

    def body(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._message.text, "refusal": None}
        if self._calls:
            message |= {"content": self._message.text or None, "tool_calls": self._calls}
        if self._body.get("return_tokens_as_token_ids"):
            values = (self._context, list(self._generation.token_ids), list(self._generation.logprobs))
            message |= zip(TOKEN_FIELDS, values, strict=True)
        choice = {"index": 0, **self._tokens(), "message": message, "finish_reason": self._finish_reason}
        answer = {**self._envelope, "object": "chat.completion", "choices": [choice], "usage": self._usage}
        return answer | ({"prompt_token_ids": self._context} if self._body.get("return_token_ids") else {})

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The completion as a stream. The policy's turn is sampled in one call, so its text is one chunk."""
        opening = {"prompt_token_ids": self._context} if self._body.get("return_token_ids") else {}
        yield self._chunk({"role": "assistant", "content": ""}) | opening
        if self._message.text:
            yield self._chunk({"content": self._message.text}, **self._tokens())
        for index, call in enumerate(self._calls):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, finish_reason=self._finish_reason)
        options = self._body.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield self._chunk({}) | {"choices": [], "usage": self._usage}

    def _chunk(self, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **fields}
        return {**self._envelope, "object": "chat.completion.chunk", "choices": [choice]}

    def _tokens(self) -> dict[str, Any]:
        """Log-probabilities and token ids, if requested."""
        tokens: dict[str, Any] = {}
        if self._body.get("logprobs"):
            pairs = zip(self._generation.token_ids, self._generation.logprobs, strict=True)
            content: list[dict[str, Any]] = [
                {"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs
            ]
            tokens["logprobs"] = {"content": content, "refusal": None}
        if self._body.get("return_token_ids"):
            tokens["token_ids"] = list(self._generation.token_ids)
        return tokens
