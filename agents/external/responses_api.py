"""The OpenAI Responses API on the wire: a request's fields, an answer as one `Response`.

Source: the public API reference of responses. The token fields on the last output item are NeMo-Gym's extension; its
agent servers ask in this dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envgym.engines.base import Generation
from envgym.responses import MalformedItem, messages_of, output_items, response, tools_of, usage, with_tokens
from envgym.types import Message, StopReason, ToolSpec

from .chat import Refusal

REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "tool_choice": (None, "auto", "none"),
}
"""Settings that would change what the policy says or how it is told, and the values of each that do not."""
ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "service_tier",
    "text",
    "tool_choice",
    "truncation",
    "user",
)
"""Fields of a request that its `Response` repeats. Sampling parameters are not among them: the run's hold."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for. Temperature and top-p are the run's, whatever it says of them."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    max_tokens: int | None
    body: Mapping[str, Any]

    def answer(self, message: Message, generation: Generation, context: list[int]) -> dict[str, Any]:
        """The `Response` that says `message`, with the exact tokens on its last item."""
        items = with_tokens(output_items(message), context, generation.token_ids, generation.logprobs)
        cut = generation.stop_reason is StopReason.LENGTH
        if cut:
            items = [{**item, "status": "incomplete"} for item in items]
        return self._response(items, cut, usage(len(context), len(generation.token_ids)))

    def out_of_budget(self) -> dict[str, Any]:
        """The `Response` where no token may be sampled any more: it says nothing, and is incomplete."""
        items = [{**item, "status": "incomplete"} for item in output_items(Message.of("assistant", ""))]
        return self._response(items, True, usage(0, 0))

    def _response(self, items: list[dict[str, Any]], cut: bool, used: Mapping[str, Any]) -> dict[str, Any]:
        repeated = {name: self.body[name] for name in ECHOED if self.body.get(name) is not None}
        model = str(self.body.get("model") or "policy")
        return response(items, model=model, tools=self.body.get("tools") or (), cut=cut, usage=used, **repeated)


def parse(body: Any) -> Asked:
    """A request's body. Raises `Refusal` for what is malformed or cannot be done."""
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is a JSON object")
    for name, harmless in REFUSED.items():
        if body.get(name) not in harmless:
            raise Refusal(400, f"{name!r} cannot be {json.dumps(body[name])[:60]}: leave it out")
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
    limit = body.get("max_output_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise Refusal(400, f"max_output_tokens is a whole number of at least 1, not {limit!r:.40}")
    return Asked(messages, () if body.get("tool_choice") == "none" else tools, limit, body)
