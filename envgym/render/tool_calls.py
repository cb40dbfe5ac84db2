"""Tool calls in the text of a turn, as the chat templates of model families write them.

Nothing here raises on what a policy wrote: a call that cannot be read comes back with an `error`, one sentence to
tell the policy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envgym.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a turn, taken apart: what stands before the first call, the calls, what stands after them."""

    content: str
    calls: tuple[ToolCall, ...]
    rest: str = ""

    @property
    def complete(self) -> bool:
        """Whether content and calls are all there is, and all could be read."""
        return not self.rest.strip() and not any(call.error for call in self.calls)


Format = Callable[[str, Mapping[str, ToolSpec]], Reading]
"""Finds the calls in a text, given the tools on offer by name."""


def read_calls(text: str, written: Format, tools: Sequence[ToolSpec], *, thinking: bool) -> Reading:
    """Find the tool calls in a turn's text, special tokens included.

    What the model only thinks (up to the last `</think>`) holds no calls; `thinking`: the prompt had opened a thought.
    """
    end = text.rfind("</think>")
    start = end + len("</think>") if end >= 0 else 0
    if end < 0 and (thinking or "<think>" in text):
        return Reading(text, ())
    by_name = {tool.name: tool for tool in tools}
    reading = written(text[start:], by_name)
    calls = tuple(_known(call, by_name) for call in reading.calls)
    return Reading(text[:start] + reading.content, calls, reading.rest)


def _known(call: ToolCall, tools: Mapping[str, ToolSpec]) -> ToolCall:
    if call.error or call.name in tools:
        return call
    return replace(
        call, arguments={}, error=f"There is no tool named {call.name[:80]!r}; the tools are: {', '.join(tools)}."
    )


def describe(tools: Sequence[ToolSpec], example: str) -> str:
    """Tools in plain text, for templates that show none; `example` is a call as it is to be written."""
    lines = [json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(["You may call these tools:", *lines, "To call one, write:", example])


EXAMPLE = ToolCall("call00000", "tool_name", {"argument": "value"})


# -- JSON -----------------------------------------------------------------------------------------------------


def write_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    """Content and calls in the Hermes format."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    blocks = [f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>" for value in objects]
    return "\n".join([content, *blocks] if content else blocks)


def read_hermes(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call>` {"name": …, "arguments": {…}} `</tool_call>`, once for each call."""
    content, calls, rest = text, [], ""
    at = text.find("<tool_call>")
    if at < 0:
        return Reading(text, ())
    content = text[:at]
    while at >= 0:
        at += len("<tool_call>")
        value, end, error = _json_at(text, at)
        close = text.find("</tool_call>", end)
        if error is None and (close < 0 or text[end:close].strip()):
            error = "The tool call does not end with </tool_call>."
        calls.append(_call(value, "arguments") if error is None else ToolCall("", "", error=error))
        after = close + len("</tool_call>") if close >= 0 else len(text)
        at = text.find("<tool_call>", after)
        rest += text[after : at if at >= 0 else len(text)]
    return Reading(content, tuple(calls), rest)


def _json_at(text: str, at: int) -> tuple[Any, int, str | None]:
    """The JSON value that begins at `at` or after spaces: (value, where it ends, what is wrong with it)."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeEncodeError:
        return None, at, "The tool call is not valid JSON: it holds a lone surrogate."
    except RecursionError:
        return None, at, "The tool call is not valid JSON: it is nested too deeply."
    except ValueError as error:
        return None, at, f"The tool call is not valid JSON: {getattr(error, 'msg', str(error))}."
    return value, end, None


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number")
    return number


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)


def _call(value: Any, *keys: str) -> ToolCall:
    """A call written as a JSON object; its arguments are under the first of `keys` that it has."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall("", "", error='The tool call has no "name": it is a JSON object with a "name", a string.')
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        return ToolCall("", name, error=f'The tool call has no "{keys[0]}", a JSON object.')
    call_id = value.get("id")
    return ToolCall(call_id if isinstance(call_id, str) else "", name, arguments)


def format_of(text: str, name: str, arguments: Mapping[str, Any]) -> Format | None:
    """The format in which a template wrote a call, given what it called; None where no format reads it."""
    tool = ToolSpec(name, "", {})
    for written in (read_hermes,):
        reading = written(text, {name: tool})
        if [(call.name, call.arguments) for call in reading.calls] == [(name, arguments)]:
            return written
    return None
