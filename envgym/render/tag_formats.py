"""Tool calls in tags, one for each argument: the formats of Qwen's and NVIDIA's later models, and of GLM.

Arguments are written as they are, so that only a tool's schema tells the string 5 from the number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from envgym.types import ToolCall, ToolSpec

from .reading import Reading, json_at, malformed

Pairs = list[tuple[str, str]]


def read_function_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        whole = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", block, re.DOTALL)
        return whole and _take(whole[1], whole[2], _PARAMETER)

    return _read(text, tools, parse, "<function=NAME><parameter=KEY>VALUE</parameter></function>")


def read_argument_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        name, opened, pairs = block.partition("<arg_key>")
        return _take(name, opened + pairs, _ARGUMENT)

    return _read(text, tools, parse, "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _take(name: str, text: str, pair: re.Pattern[str]) -> tuple[str, Pairs] | None:
    """A name and the pairs that a text consists of; None where there is anything else in it."""
    pairs, at = [], 0
    while at < len(text) and (found := pair.match(text, at)):
        pairs.append((found[1].strip(), found[2]))
        at = found.end()
    return (name.strip(), pairs) if name.strip() and not text[at:].strip() else None


def _read(
    text: str, tools: Mapping[str, ToolSpec], parse: Callable[[str], tuple[str, Pairs] | None], form: str
) -> Reading:
    content, *parts = text.split("<tool_call>")
    calls, rest = [], []
    for part in parts:
        block, closed, after = part.partition("</tool_call>")
        taken = parse(block) if closed else None
        if taken is None:
            calls.append(malformed(f"A tool call has the form <tool_call>{form}</tool_call>."))
        else:
            calls.append(_call(*taken, tools))
        rest.append(after)
    return Reading(content, tuple(calls), "".join(rest))


def _call(name: str, pairs: Iterable[tuple[str, str]], tools: Mapping[str, ToolSpec]) -> ToolCall:
    properties = tools[name].parameters.get("properties", {}) if name in tools else {}
    return ToolCall("", name, {key: _value(text, properties.get(key)) for key, text in pairs})


_PYTHON = {"True": True, "False": False, "None": None}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "array": list, "object": dict, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip


def _value(text: str, schema: Any) -> Any:
    """An argument, by what its schema says it is: a string as it stands, anything else from JSON."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    types = {declared} if isinstance(declared, str) else set(declared or ())
    if types == {"string"}:
        return text
    value, end, error = json_at(text, 0)
    if text.strip() in _PYTHON:  # as some templates write them
        value, end, error = _PYTHON[text.strip()], len(text), ""
    if error or text[end:].strip():
        return text
    if "string" in types and not any(isinstance(value, _TYPES[kind]) for kind in types & set(_TYPES)):
        return text
    return value
