"""Tool calls in the text of a turn, in the format of the model's own template.

Nothing here raises on what a policy wrote: a call that cannot be read comes back with an `error`, one sentence to
tell the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.types import ToolCall, ToolSpec

from .call_formats import (
    Format,
    Reading,
    json_at,
    malformed,
    read_argument_tags,
    read_deepseek,
    read_function_tags,
    read_hermes,
    read_llama,
    read_mistral,
)

FORMATS: tuple[Format, ...] = (
    read_hermes,
    read_function_tags,
    read_argument_tags,
    read_mistral,
    read_deepseek,
    read_llama,
)
EXAMPLE = ToolCall("call00000", "tool_name", {"argument": "value"})


def read_calls(text: str, written: Format, tools: Sequence[ToolSpec], *, thinking: bool) -> Reading:
    """Find the tool calls in a turn's text, special tokens included.

    What the model only thinks (up to the last `</think>`) holds no calls; `thinking`: the prompt had opened a thought.
    """
    before, thought, answer = text.rpartition("</think>")
    if not thought and (thinking or "<think>" in text):
        return Reading(text)
    by_name = {tool.name: tool for tool in tools}
    reading = written(answer, by_name)
    calls = tuple(_known(call, by_name) for call in reading.calls)
    return Reading(before + thought + reading.content, calls, reading.rest)


def written_call(name: Any, arguments: Any, tools: Sequence[ToolSpec]) -> ToolCall:
    """A call as OpenAI-compatible APIs write it: the tool's name, and its arguments as JSON text."""
    if not isinstance(name, str) or not name:
        return malformed("A tool call names a tool.")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    value, end, error = json_at(text, 0) if text.strip() else ({}, len(text), "")
    if not error and (not isinstance(value, dict) or text[end:].strip()):
        error = f"The arguments of {name[:80]!r} are not one JSON object."
    if error:
        return malformed(error, name)
    return _known(ToolCall("", name, value), {tool.name: tool for tool in tools})


def _known(call: ToolCall, tools: Mapping[str, ToolSpec]) -> ToolCall:
    if call.error or call.name in tools:
        return call
    error = f"There is no tool {call.name[:80]!r}; the tools are: {', '.join(tools)}."
    return replace(call, arguments={}, error=error)


def format_of(text: str, name: str, arguments: Mapping[str, Any]) -> Format | None:
    """The format in which a template wrote this call; None where no format reads it."""
    tools = {name: ToolSpec(name, "", {"properties": {key: {"type": "string"} for key in arguments}})}
    for written in FORMATS:
        reading = written(text, tools)
        if reading.complete and [(call.name, call.arguments) for call in reading.calls] == [(name, arguments)]:
            return written
    return None


def describe(tools: Sequence[ToolSpec], example: str) -> str:
    """Tools in plain text, for templates that show none; `example` is a call as it is to be written."""
    lines = [json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(["You may call these tools:", *lines, "To call one, write:", example])
