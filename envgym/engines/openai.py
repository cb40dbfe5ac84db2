"""Any OpenAI-compatible API as the policy: messages in, a message out. Without tokens there is nothing to train on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from envgym.engine import ChatEngine, ChatReply, ChatRequest, SamplingParams
from envgym.errors import ConfigError, InvalidOutcome, PromptTooLong
from envgym.net.client import RequestRejected, Unreachable
from envgym.render.spelling import escape_for_api, mark_after_prompt, rewrite_tools
from envgym.render.tool_calls import parse_api_call
from envgym.services.chat import ChatCompletions, first_choice, usage_of
from envgym.services.declarations import Chat
from envgym.types import Message, StopReason, ToolCall, ToolSpec

CUT = ("length", "max_tokens", "model_length")
"""Finish reasons of a completion that its token limit ended."""
BROKEN = ("error", "abort", "insufficient_system_resource")
"""Finish reasons of a completion that the server itself aborted."""
TOO_LONG = re.compile(
    r"context[ _-](length|window|size)|max_model_len|prompt is too long|input token count .* exceeds the maximum",
    re.IGNORECASE,
)
"""Servers' messages for a conversation that does not fit. Their codes differ: OpenAI's is `context_length_exceeded`."""
QUESTION = Message("user", "Reply with the word OK.")


class OpenAIEngine(ChatEngine):
    """Posts to `BASE_URL/chat/completions`, and is used within one event loop.

    A request that fails by the network or the server is retried, up to `api.tries` tries in all. `counters` counts
    requests, retries, failures, prompt_tokens, completion_tokens. Raises `ConfigError` if the key's variable is unset.
    """

    def __init__(self, api: Chat) -> None:
        self.counters: Counter[str] = Counter()
        self._key_variable = api.api_key_env
        self._api = ChatCompletions(api, self.counters)

    async def check(self, sampling: SamplingParams, tools: tuple[ToolSpec, ...] = ()) -> str:
        """Send one short request with the settings of the run, and its tools if given. Returns the reason of a
        transient failure (a busy server, say), else "".

        Raises `ConfigError` where every request would fail: the server cannot be reached, or rejects the key, the model
        or a setting. A completion is requested, because it needs all of these to be right and every server has it;
        `GET /models` is often open to everyone, or absent.
        """
        try:
            await self._ask(ChatRequest("check", (QUESTION,), tools, sampling), tries=1)
        except Unreachable as error:
            raise ConfigError(f"{error}: is engine.base_url right, and the server running?") from None
        except RequestRejected as error:
            advice = "; the test without the environment's tools passed" if tools else self._advice(error.status)
            raise ConfigError(f"{error}{advice}") from None
        except PromptTooLong as error:
            raise ConfigError(f"{error}: lower rollout.max_tokens") from None
        except InvalidOutcome as error:
            return str(error)
        return ""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """The assistant's next message.

        Raises `PromptTooLong` if the conversation does not fit the model's context; `InvalidOutcome` of kind
        `content_filter` if the provider withheld the completion, and of kind `engine` if there is none.
        """
        try:
            return await self._ask(request)
        except InvalidOutcome as error:
            if error.kind == "content_filter":
                raise
            # The kind `service` is for the environments' own models.
            raise InvalidOutcome("engine", str(error), retryable=error.retryable) from None

    async def close(self) -> None:
        await self._api.close()

    async def _ask(self, request: ChatRequest, *, tries: int | None = None) -> ChatReply:
        """The server's reply. Raises `PromptTooLong`, `RequestRejected`, or `InvalidOutcome` if there is none."""
        try:
            answer = await self._api.ask(self._body(request), defect=_defect, tries=tries)
        except RequestRejected as error:
            is_named = error.status in (400, 413, 422) and TOO_LONG.search(str(error))
            if is_named or error.code == "context_length_exceeded":
                raise PromptTooLong(str(error)) from None
            raise
        choice = first_choice(answer)
        assert choice is not None, "_defect has checked it"
        reason = choice.get("finish_reason")
        if reason == "content_filter":
            self.counters["failures"] += 1
            raise InvalidOutcome("content_filter", f"{self._api.name}: the provider's filter withheld the completion")
        reply = choice["message"]
        message = Message("assistant", _text(reply), _calls(reply.get("tool_calls"), request))
        return ChatReply(message, StopReason.LENGTH if reason in CUT else StopReason.STOP, **usage_of(answer))

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        # `top_p` also at 1: servers have defaults of their own. `top_k` is not one of OpenAI's parameters.
        sampling = request.sampling
        changes = {"stop_token_ids": None, "top_k": sampling.top_k or None, "stop": list(sampling.stop) or None}
        tools = [tool.as_dict() for tool in rewrite_tools(request.tools, escape_for_api)] or None
        return self._api.body(mark_after_prompt(request.messages), **(asdict(sampling) | changes), tools=tools)

    def _advice(self, status: int) -> str:
        """The remedy for a rejected request, as the rest of a sentence."""
        if status in (401, 403):  # the message already names the key
            return f" in ${self._key_variable}" if self._key_variable else " (engine.api_key_env names its variable)"
        if status in (404, 405):
            return (
                "; engine.base_url is the address before /chat/completions (http://127.0.0.1:8000/v1), and --model the "
                "name under which the server has the model"
            )
        return "; rename or omit a field that the server does not take with engine.extra (engine.extra.top_p=null)"


def _defect(answer: Any) -> str:
    """The reason why a response is unusable, as the rest of a sentence that begins with the server's name; "" if it is
    usable."""
    choice = first_choice(answer)
    if choice is None:
        error = answer.get("error") if isinstance(answer, dict) else None
        reason = error.get("message") if isinstance(error, dict) else error
        return f"answers without any message{f' ({reason})'[:200] if reason else ''}"
    reason = choice.get("finish_reason")
    return f"gave its answer up ({reason})" if reason in BROKEN else ""


def _text(message: Mapping[str, Any]) -> str:
    """The completion's text, or the model's own refusal, without its thoughts (`reasoning_content`)."""
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return str(content).encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be encoded


def _calls(items: Any, request: ChatRequest) -> tuple[ToolCall, ...]:
    """The tool calls of an answer to a request that offered tools, each with a unique id."""
    calls: list[ToolCall] = []
    for number, item in enumerate(items if request.tools and isinstance(items, list) else ()):
        function = item.get("function") if isinstance(item, dict) else None
        function = function if isinstance(function, dict) else {}
        call = parse_api_call(function.get("name"), function.get("arguments"), request.tools)
        call_id = item.get("id") if isinstance(item, dict) else None
        if not isinstance(call_id, str) or not call_id or call_id in {earlier.id for earlier in calls}:
            call_id = f"{re.sub('[^a-zA-Z0-9]', '', request.id)}{number:05d}"[-9:]
        calls.append(replace(call, id=call_id))
    return tuple(calls)
