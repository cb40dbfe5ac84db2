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
from typing import Any, ClassVar, NoReturn, Self

from envgym.engine import Generation
from envgym.types import Message, StopReason, ToolSpec, as_messages

from .conversation import PolicyAnswer

Body = dict[str, Any]
"""The JSON object of an answer, or of one of its chunks."""
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The token fields of a message or an output item: all three are present, or none."""
REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none", "required"),  # turns without a call are counted for `required`
    "n": (None, 1),
    "logit_bias": (None, {}),
}
"""Settings that would change the policy's answers, and the accepted values of each, which do not."""
MAX_STOPS = 64
"""Maximum number of texts that stop an answer."""
EXHAUSTED = {
    "context": "the model's context length is used up",
    "tokens": "the episode's max_tokens are used up",
    "time": "the episode's time in the engine is used up, as if by its max_tokens",
    "template": "the chat template accepts no further turn after the policy's last one, whatever the context length",
}
"""Reasons why no more tokens can be sampled. Programs search them for `context length` and `max_tokens`."""


class Refusal(Exception):
    """A rejected request: the HTTP status and the API's code of the answer."""

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def check_settings(body: Any, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `Refusal` if the body is no object, or if a setting has a value that is not among the harmless ones."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is a JSON object")
    for name, values in harmless.items():
        if body.get(name) not in values:
            raise Refusal(400, f"{name!r} cannot be {json.dumps(body[name])[:60]}: leave it out")


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """A request for the policy's next turn. Temperature and top-p are the run's, whatever the request sets."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None
    body: Mapping[str, Any]
    stop: tuple[str, ...] = ()
    """Texts that end the answer, which has the text before the first of them."""
    needs_call: bool = False
    """True if the answer is to have a tool call."""

    events_end: ClassVar[bytes] = b""
    """The last bytes of a stream."""

    @classmethod
    def from_body(
        cls, body: Any, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], name: str, stop: Any, choice: Any
    ) -> Self:
        """Check `stop` and the maximum tokens of the answer, which setting `name` holds. Raises a `Refusal`."""
        limit = body.get(name)
        texts = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(texts, list) or len(texts) > MAX_STOPS or not all(isinstance(text, str) for text in texts):
            raise Refusal(400, f"the texts that stop an answer are text or a list of at most {MAX_STOPS}")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise Refusal(400, f"{name} is a whole number of at least 1, not {limit!r:.40}")
        tools = () if choice == "none" else tools
        return cls(messages, tools, limit, body, tuple(filter(None, texts)), choice == "required")

    @staticmethod
    def error_body(refusal: Refusal) -> Body:
        """The body of an error in the form of the API."""
        error = {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": refusal.code}
        return {"error": error}


class CompletionRequest(PolicyRequest):
    """A request for a chat completion."""

    events_end: ClassVar[bytes] = b"data: [DONE]\n\n"

    @classmethod
    def parse(cls, body: Any) -> CompletionRequest:
        """Parse a body. Raises a `Refusal` if it is malformed or asks for something unsupported."""
        check_settings(body, REFUSED)
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise Refusal(400, "messages is a list of at least one message")
        try:
            messages = tuple(
                replace(message, role="system") if message.role == "developer" else message
                for message in as_messages([_with_reasoning(message) for message in body["messages"]])
            )
            tools = tuple(_tool(tool) for tool in body.get("tools") or ())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(400, f"malformed messages or tools: {type(error).__name__}: {error}") from None
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        return cls.from_body(body, messages, tools, limit, body.get("stop"), body.get("tool_choice"))

    def answer(self, answer: PolicyAnswer) -> Body | Iterator[Body]:
        """The completion, or its chunks if a stream is requested."""
        completion = self._completion(answer.message, answer.generation, answer.context)
        return self._chunks(completion) if self.body.get("stream") else completion

    def out_of_budget(self, reason: str) -> NoReturn:
        """Raise the `Refusal` of a request for which no token can be sampled."""
        raise Refusal(400, EXHAUSTED[reason], "context_length_exceeded")

    def _completion(self, message: Message, generation: Generation, context: list[int]) -> Body:
        """The completion, with log-probabilities and token ids where they are requested."""
        turn: Body = {"role": "assistant", "content": message.text, "refusal": None}
        if message.tool_calls:
            calls = message.as_dict(arguments_as_text=True)["tool_calls"]
            turn |= {"content": message.text or None, "tool_calls": calls}
        ids, logprobs = list(generation.token_ids), list(generation.logprobs)
        if self.body.get("return_tokens_as_token_ids"):
            turn |= zip(TOKEN_FIELDS, (context, ids, logprobs), strict=True)
        finish_reason = "tool_calls" if message.tool_calls else "stop"
        if generation.stop_reason is StopReason.LENGTH:
            finish_reason = "length"
        choice: Body = {"index": 0, "message": turn, "finish_reason": finish_reason}
        if self.body.get("logprobs"):
            tokens = zip(ids, logprobs, strict=True)
            content: list[Body] = [
                {"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in tokens
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        completion: Body = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(self.body.get("model", "policy")),
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(context),
                "completion_tokens": len(ids),
                "total_tokens": len(context) + len(ids),
            },
        }
        if self.body.get("return_token_ids"):
            choice["token_ids"] = ids
            completion["prompt_token_ids"] = context
        return completion

    def _chunks(self, completion: Body) -> Iterator[Body]:
        """The completion as a stream: the policy's turn is sampled in one call, so it is one chunk."""
        [choice] = completion["choices"]
        usage = completion.pop("usage")
        delta = choice.pop("message")
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
        chunk = {**completion, "object": "chat.completion.chunk"}
        options = self.body.get("stream_options")
        with_usage = isinstance(options, Mapping) and options.get("include_usage")
        yield {**chunk, "choices": [{**choice, "delta": delta}], **({"usage": None} if with_usage else {})}
        if with_usage:
            yield {**chunk, "choices": [], "usage": usage}


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
