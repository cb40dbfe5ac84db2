"""What a turn's text says: content, tool calls and the rest; and reading JSON that a policy wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envgym.types import ToolCall, ToolSpec

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a turn, taken apart: what stands before the first call, the calls, what stands after and between."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    rest: str = ""

    @property
    def complete(self) -> bool:
        """Whether content and calls are all there is, and all could be read."""
        return not self.rest.strip() and not any(call.error for call in self.calls)


Format = Callable[[str, Mapping[str, ToolSpec]], Reading]
"""Finds the calls in a text, given the tools on offer by name."""


def malformed(error: str, name: str = "") -> ToolCall:
    """A call that cannot be read."""
    return ToolCall("", name, error=error)


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def json_at(text: str, at: int) -> tuple[Any, int, str]:
    """The JSON value at `at` or after spaces there: (value, where it ends, what is wrong with it or nothing)."""
    at = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except json.JSONDecodeError as error:
        near = text[error.pos : error.pos + 20]
        where = f"at {near!r}" if near else "at its end"
        return None, at, f"The tool call is not valid JSON: {error.msg} {where}."
    except RecursionError:
        return None, at, "The tool call is not valid JSON: it is nested too deeply."
    except ValueError as error:  # numbers beyond measure, half characters
        return None, at, f"The tool call is not valid JSON: {error}."
    return value, end, ""


def call_of(value: Any, *keys: str) -> ToolCall:
    """A call written as a JSON object with its arguments under one of `keys`."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return malformed(f'A tool call is a JSON object with "name", a string, and "{keys[0]}".')
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        return malformed(f'The call of {name[:80]!r} lacks "{keys[0]}", a JSON object.', name)
    call_id = value.get("id")
    return ToolCall(call_id if isinstance(call_id, str) else "", name, arguments)


def call_at(text: str, at: int, *keys: str) -> tuple[ToolCall, int]:
    """The call written as a JSON object at `at`, and where it ends."""
    value, end, error = json_at(text, at)
    return (malformed(error) if error else call_of(value, *keys)), end


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number")
    return number


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)


def _depth(value: Any) -> int:
    """How deeply lists and objects are nested; no further than it matters."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        depth += bool(inner)
    return depth
