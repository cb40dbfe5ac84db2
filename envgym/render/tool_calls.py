"""Tool calls in the text of a turn, and the formats that policies write them in: JSON (Hermes and Qwen, Llama 3,
Mistral, DeepSeek) and tags, one for each argument (Qwen's and NVIDIA's later models, GLM). The format of a chat
template is found by rendering a probe (`find_format`).

A reader never raises on what a policy wrote: a call that cannot be read comes back with an `error`, one sentence to
tell the policy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from envgym.types import Message, ToolCall, ToolSpec

MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of a turn, taken apart: what stands before the first call, the calls, what stands after and between."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    rest: str = ""

    @property
    def complete(self) -> bool:
        """True where content and calls are all there is, and all could be read."""
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
    """The depth of nested lists and objects, counted up to just past `MAX_DEPTH`."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        depth += bool(inner)
    return depth


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


def describe(tools: Sequence[ToolSpec], example: str) -> str:
    """Tools in plain text, for templates that show none; `example` is a call as it is to be written."""
    lines = [json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(["You may call these tools:", *lines, "To call one, write:", example])


# -- JSON ----------------------------------------------------------------------------------------------------------


def write_hermes(content: str, calls: Sequence[ToolCall]) -> str:
    """Content and calls in the Hermes format."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    blocks = [f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>" for value in objects]
    return "\n".join([content, *blocks] if content else blocks)


def read_hermes(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call."""
    calls, rest = [], []
    first = at = text.find("<tool_call>")
    while at >= 0:
        call, end = call_at(text, at + len("<tool_call>"), "arguments")
        close = text.find("</tool_call>", end)
        if not call.error and (close < 0 or text[end:close].strip()):
            call = malformed("The tool call does not end with </tool_call> after its JSON.", call.name)
        calls.append(call)
        after = close + len("</tool_call>") if close >= 0 else len(text)
        at = text.find("<tool_call>", after)
        rest.append(text[after : at if at >= 0 else None])
    return Reading(text[:first] if calls else text, tuple(calls), "".join(rest))


def read_llama(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """A turn that is JSON, `{"name": …, "parameters": {…}}`, several of them separated by `;`; perhaps after
    `<|python_tag|>`. JSON that names nothing is an answer, not a call."""
    tagged = text.lstrip().startswith("<|python_tag|>")
    body = text.lstrip().removeprefix("<|python_tag|>").lstrip()
    if not tagged and not (body.startswith("{") and ('"name"' in body or '"parameters"' in body)):
        return Reading(text)
    calls: list[ToolCall] = []
    at = 0
    while at < len(body):
        if calls and not body.startswith("{", at):
            break
        call, at = call_at(body, at, "parameters", "arguments")
        calls.append(call)
        if call.error:
            at = len(body)  # nobody knows where it ends
        at = skip_space(body, at)
        at = skip_space(body, at + 1) if body.startswith((";", ","), at) else at
    return Reading("", tuple(calls), body[at:])


def read_mistral(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`[TOOL_CALLS]` before a JSON list of `{"name": …, "arguments": {…}, "id": …}`; or, in later versions, before each
    call, `name[ARGS]{…}`."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    rest = []
    for part in parts:
        start = skip_space(part, 0)
        if part.startswith(("[", "{"), start):
            value, end, error = json_at(part, start)
            found = value if isinstance(value, list) else [value]
            calls += [malformed(error)] if error else [call_of(item, "arguments") for item in found]
        else:
            brace = part.find("{")
            head = part if brace < 0 else part[:brace]
            name = head.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
            value, end, error = json_at(part, len(head))
            calls.append(malformed(error, name) if error else call_of({"name": name, "arguments": value}, "arguments"))
        rest.append("" if calls and calls[-1].error else part[end:])
    return Reading(content, tuple(calls), "".join(rest))


def read_deepseek(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """Between its own special tokens: `function`, a separator, the name and fenced JSON; or, in later versions, the
    name, the separator and bare JSON."""
    head, *parts = text.split("<｜tool▁call▁begin｜>")
    if not parts:
        return Reading(text)
    calls, rest = [], []
    for part in parts:
        body, closed, after = part.partition("<｜tool▁call▁end｜>")
        first, _, second = body.partition("<｜tool▁sep｜>")
        brace = second.find("{")
        between = second if brace < 0 else second[:brace]
        name = between.partition("```")[0].strip() or first.strip()
        value, end, error = json_at(second, len(between))
        if error:
            calls.append(malformed(error, name))
        elif not closed or second[end:].strip().strip("`"):
            calls.append(malformed("The tool call does not end after its JSON.", name))
        else:
            calls.append(call_of({"name": name, "arguments": value}, "arguments"))
        rest.append(after.replace("<｜tool▁calls▁end｜>", ""))
    return Reading(head.removesuffix("<｜tool▁calls▁begin｜>"), tuple(calls), "".join(rest))


# -- Tags: arguments are written as they are, so that only a tool's schema tells the string 5 from the number ------

Pairs = list[tuple[str, str]]


def read_function_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        whole = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", block, re.DOTALL)
        return whole and _name_and_pairs(whole[1], whole[2], _PARAMETER)

    return _read_tags(text, tools, parse, "<function=NAME><parameter=KEY>VALUE</parameter></function>")


def read_argument_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        name, opened, pairs = block.partition("<arg_key>")
        return _name_and_pairs(name, opened + pairs, _ARGUMENT)

    return _read_tags(text, tools, parse, "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _name_and_pairs(name: str, text: str, pair: re.Pattern[str]) -> tuple[str, Pairs] | None:
    """A name and the pairs that a text consists of; None where there is anything else in it."""
    pairs, at = [], 0
    while at < len(text) and (found := pair.match(text, at)):
        pairs.append((found[1].strip(), found[2]))
        at = found.end()
    return (name.strip(), pairs) if name.strip() and not text[at:].strip() else None


def _read_tags(
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


# -- The format of a chat template ------------------------------------------------------------------------------------

FORMATS: tuple[Format, ...] = (
    read_hermes, read_function_tags, read_argument_tags, read_mistral, read_deepseek, read_llama,
)  # fmt: skip
EXAMPLE = ToolCall("call00000", "tool_name", {"argument": "value"})
"""The probe, and what policies are shown."""


CallForm = Callable[[str, Sequence[ToolCall]], dict[str, Any]]
"""The form in which a template takes content and calls."""


def _with_calls(empty: str | None, as_text: bool, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message: `empty` in place of a content that says nothing, arguments as text or not."""
    message = Message("assistant", (), tuple(calls)).as_dict() | {"content": content or empty}
    for call in message["tool_calls"] if as_text else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message


def find_format(turn: Callable[[dict[str, Any]], str]) -> tuple[CallForm, Format] | None:
    """The form in which a chat template takes calls and the format in which it writes them, found by rendering
    `EXAMPLE` with `turn`. None where it does not, or in a format that cannot be read."""
    tools = {EXAMPLE.name: ToolSpec(EXAMPLE.name, "", {"properties": {"argument": {"type": "string"}}})}
    for empty in ("", None):
        for as_text in (False, True):
            form = partial(_with_calls, empty, as_text)
            written = turn(form("", [EXAMPLE]))
            for read in FORMATS:
                reading = read(written, tools)
                if reading.complete and [(c.name, c.arguments) for c in reading.calls] == [
                    (EXAMPLE.name, EXAMPLE.arguments)
                ]:
                    return form, read
    return None
