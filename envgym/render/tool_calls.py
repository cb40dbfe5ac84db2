"""Tool calls in the text of a turn, and the formats that policies write them in: JSON (Hermes and Qwen, Llama 3,
Mistral, DeepSeek) and tags, one for each argument (Qwen's and NVIDIA's later models, GLM). The format of a chat
template is found by rendering a probe (`find_format`).

A reader raises no error on a completion: an unreadable call is returned with an `error`, one sentence for the
policy.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from envgym.types import Message, ToolCall, ToolSpec
from envgym.types.conversations import END_OF_THOUGHT, THINK

MAX_DEPTH = 64
MAX_TRIES = 8
"""Maximum number of nested schemas that are searched for an argument's type, and of ends of thoughts after which a call
is searched."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsed text of a turn: `content` before the first call, the calls, and the text after and between them."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    text_after: str = ""

    @property
    def is_complete(self) -> bool:
        """True if there is no other text than content and calls, and every call could be read."""
        return not self.text_after.strip() and not any(call.error for call in self.calls)


Format = Callable[[str, Mapping[str, ToolSpec]], Reading]
"""A function that finds the calls in a text, given the offered tools by name."""


def malformed_call(error: str, name: str = "") -> ToolCall:
    """An unreadable call."""
    return ToolCall("", name, error=error)


def skip_space(text: str, pos: int) -> int:
    while pos < len(text) and text[pos].isspace():
        pos += 1
    return pos


def parse_json(text: str, pos: int) -> tuple[Any, int, str]:
    """Parse the JSON value at `pos`, after optional spaces: (value, its end, error message or "")."""
    pos = skip_space(text, pos)
    try:
        value, end = _DECODER.raw_decode(text, pos)
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False).encode()  # an unpaired surrogate cannot be encoded
    except json.JSONDecodeError as error:
        excerpt = text[error.pos : error.pos + 20]
        location = f"at {excerpt!r}" if excerpt else "at its end"
        return None, pos, f"The tool call is not valid JSON: {error.msg} {location}."
    except RecursionError:
        return None, pos, "The tool call is not valid JSON: it is nested too deeply."
    except ValueError as error:  # infinite numbers, unpaired surrogates
        return None, pos, f"The tool call is not valid JSON: {error}."
    return value, end, ""


def to_call(value: Any, *keys: str) -> ToolCall:
    """Convert a JSON object with its arguments under one of `keys` to a call; any other value to a call with an
    `error`."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return malformed_call(f'A tool call is a JSON object with "name", a string, and "{keys[0]}".')
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        return malformed_call(f'The call of {name[:80]!r} lacks "{keys[0]}", a JSON object.', name)
    call_id = value.get("id")
    return ToolCall(call_id if isinstance(call_id, str) else "", name, arguments)


def parse_call(text: str, pos: int, *keys: str) -> tuple[ToolCall, int]:
    """Parse the call written as a JSON object at `pos`; return it, perhaps with an `error`, and its end."""
    value, end, error = parse_json(text, pos)
    return (malformed_call(error) if error else to_call(value, *keys)), end


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


def read_calls(
    text: str, reader: Format, tools: Sequence[ToolSpec], *, thinking: bool, is_thinker: bool = False
) -> Reading:
    """Find the tool calls in a turn's text, special tokens included.

    Thoughts hold no calls. One begins in the prompt (`thinking`), or at a `<think>` before the first call, and ends at
    the next `</think>`; marks in the arguments of a call are text. One without an end is text too, unless the prompt
    began it or the template writes thoughts (`is_thinker`).
    """
    by_name = {tool.name: tool for tool in tools}
    start, is_open = 0, thinking
    for number in count():
        reading = reader(text[start:], by_name)
        # Where a turn is a call or none, the first thought may hide one; a few are tried, as a text may hold thousands.
        find = reading.content.rfind if reading.calls or number == MAX_TRIES else reading.content.find
        end = find(END_OF_THOUGHT)
        is_open |= THINK in reading.content
        if end < 0 and is_open and not (reading.calls and reading.is_complete):
            end = text.find(END_OF_THOUGHT, start) - start
        if end < 0:
            break
        start, is_open = start + end + len(END_OF_THOUGHT), False
    if is_open and (thinking or is_thinker):
        return Reading(text)
    calls = tuple(_check_name(call, by_name) for call in reading.calls)
    return Reading(text[:start] + reading.content, calls, reading.text_after)


def parse_api_call(name: Any, arguments: Any, tools: Sequence[ToolSpec]) -> ToolCall:
    """Parse a call in the form of OpenAI-compatible APIs: the tool's name, and its arguments as JSON text (none: {}).
    An unusable call gets an `error`."""
    if not isinstance(name, str) or not name:
        return malformed_call("A tool call names a tool.")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    value, end, error = parse_json(text, 0) if text.strip() else ({}, len(text), "")
    if not error and (not isinstance(value, dict) or text[end:].strip()):
        error = f"The arguments of {name[:80]!r} are not one JSON object."
    if error:
        return malformed_call(error, name)
    return _check_name(ToolCall("", name, value), {tool.name: tool for tool in tools})


def _check_name(call: ToolCall, tools: Mapping[str, ToolSpec]) -> ToolCall:
    """The call; with an `error` and no arguments if no tool has its name."""
    if call.error or call.name in tools:
        return call
    error = f"There is no tool {call.name[:80]!r}; the tools are: {', '.join(tools)}."
    return replace(call, arguments={}, error=error)


def describe(tools: Sequence[ToolSpec], example: str) -> str:
    """Describe tools in plain text, for templates that show none; `example` is a call in the expected format."""
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
    calls, texts_after = [], []
    first = pos = text.find("<tool_call>")
    while pos >= 0:
        call, end = parse_call(text, pos + len("<tool_call>"), "arguments")
        close = text.find("</tool_call>", end)
        if not call.error and (close < 0 or text[end:close].strip()):
            call = malformed_call("The tool call does not end with </tool_call> after its JSON.", call.name)
        calls.append(call)
        end_of_call = close + len("</tool_call>") if close >= 0 else len(text)
        pos = text.find("<tool_call>", end_of_call)
        texts_after.append(text[end_of_call : pos if pos >= 0 else None])
    return Reading(text[:first] if calls else text, tuple(calls), "".join(texts_after))


def read_llama(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """A turn that is JSON, `{"name": …, "parameters": {…}}`, several of them separated by `;`; perhaps after
    `<|python_tag|>`. JSON that names nothing is an answer, not a call."""
    tagged = text.lstrip().startswith("<|python_tag|>")
    body = text.lstrip().removeprefix("<|python_tag|>").lstrip()
    if not tagged and not (body.startswith("{") and ('"name"' in body or '"parameters"' in body)):
        return Reading(text)
    calls: list[ToolCall] = []
    pos = 0
    while pos < len(body):
        if calls and not body.startswith("{", pos):
            break
        call, pos = parse_call(body, pos, "parameters", "arguments")
        calls.append(call)
        if call.error:
            pos = len(body)  # its end is unknown
        pos = skip_space(body, pos)
        pos = skip_space(body, pos + 1) if body.startswith((";", ","), pos) else pos
    return Reading("", tuple(calls), body[pos:])


def read_mistral(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`[TOOL_CALLS]` before a JSON list of `{"name": …, "arguments": {…}, "id": …}`; or, in later versions, before each
    call, `name[ARGS]{…}`."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    texts_after = []
    for part in parts:
        start = skip_space(part, 0)
        if part.startswith(("[", "{"), start):
            value, end, error = parse_json(part, start)
            items = value if isinstance(value, list) else [value]
            calls += [malformed_call(error)] if error else [to_call(item, "arguments") for item in items]
        else:
            head = part.partition("{")[0]
            name = head.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
            value, end, error = parse_json(part, len(head))
            call = {"name": name, "arguments": value}
            calls.append(malformed_call(error, name) if error else to_call(call, "arguments"))
        texts_after.append("" if calls and calls[-1].error else part[end:])
    return Reading(content, tuple(calls), "".join(texts_after))


def read_deepseek(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """Between its own special tokens: `function`, a separator, the name and fenced JSON; or, in later versions, the
    name, the separator and bare JSON."""
    head, *parts = text.split("<｜tool▁call▁begin｜>")
    if not parts:
        return Reading(text)
    calls, texts_after = [], []
    for part in parts:
        body, closed, tail = part.partition("<｜tool▁call▁end｜>")
        first, _, second = body.partition("<｜tool▁sep｜>")
        separator = second.partition("{")[0]
        name = separator.partition("```")[0].strip() or first.strip()
        value, end, error = parse_json(second, len(separator))
        if error:
            calls.append(malformed_call(error, name))
        elif not closed or second[end:].strip().strip("`"):
            calls.append(malformed_call("The tool call does not end after its JSON.", name))
        else:
            calls.append(to_call({"name": name, "arguments": value}, "arguments"))
        texts_after.append(tail.replace("<｜tool▁calls▁end｜>", ""))
    return Reading(head.removesuffix("<｜tool▁calls▁begin｜>"), tuple(calls), "".join(texts_after))


# -- Tags: arguments are not quoted, so that only a tool's schema distinguishes the string 5 from the number ------

Pairs = list[tuple[str, str]]


def read_function_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        match = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", block, re.DOTALL)
        return match and _name_and_pairs(match[1], match[2], _PARAMETER)

    return _read_tags(text, tools, parse, "<function=NAME><parameter=KEY>VALUE</parameter></function>")


def read_argument_tags(text: str, tools: Mapping[str, ToolSpec]) -> Reading:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`"""

    def parse(block: str) -> tuple[str, Pairs] | None:
        name, opening, pairs = block.partition("<arg_key>")
        return _name_and_pairs(name, opening + pairs, _ARGUMENT)

    return _read_tags(text, tools, parse, "NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _name_and_pairs(name: str, text: str, pair: re.Pattern[str]) -> tuple[str, Pairs] | None:
    """A name and the pairs of a text; None if it contains anything else."""
    pairs, pos = [], 0
    while pos < len(text) and (match := pair.match(text, pos)):
        pairs.append((match[1].strip(), match[2]))
        pos = match.end()
    return (name.strip(), pairs) if name.strip() and not text[pos:].strip() else None


def _read_tags(
    text: str, tools: Mapping[str, ToolSpec], parse: Callable[[str], tuple[str, Pairs] | None], form: str
) -> Reading:
    """Read `<tool_call>` blocks with `parse`, which returns None for a malformed one; `form` is shown in its error."""
    content, *parts = text.split("<tool_call>")
    calls, texts_after = [], []
    for part in parts:
        block, closed, tail = part.partition("</tool_call>")
        parsed = parse(block) if closed else None
        if parsed is None:
            calls.append(malformed_call(f"A tool call has the form <tool_call>{form}</tool_call>."))
        else:
            calls.append(_call(*parsed, tools))
        texts_after.append(tail)
    return Reading(content, tuple(calls), "".join(texts_after))


def _call(name: str, pairs: Iterable[tuple[str, str]], tools: Mapping[str, ToolSpec]) -> ToolCall:
    schema = tools[name].parameters if name in tools else {}
    properties = schema.get("properties") or {}
    return ToolCall("", name, {key: _convert(text, _types_in(properties.get(key), schema)) for key, text in pairs})


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,), "number": (int, float),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def _types_in(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, as far as it says; `root` holds what it refers to."""
    if not isinstance(schema, Mapping) or depth > MAX_TRIES:
        return set()
    declared = schema.get("type")
    types = {name for name in ([declared] if isinstance(declared, str) else declared or ()) if isinstance(name, str)}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    types |= {next(kind for kind in _TYPES if isinstance(value, _TYPES[kind])) for value in values if not types}
    target: Any = root if str(schema.get("$ref", "")).startswith("#/") else None
    for name in str(schema.get("$ref", "")).split("/")[1:]:
        target = target.get(name) if isinstance(target, Mapping) else None
    alternatives = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()] + [target]
    return types.union(*(_types_in(part, root, depth + 1) for part in alternatives))


def _convert(text: str, types: set[str]) -> Any:
    """Convert an argument to one of the types in its schema: a string stays, other types are read from JSON, or from
    the Python literals that some templates and models write. A text that is neither stays."""
    if types == {"string"}:
        return text
    value, end, error = parse_json(text, 0)
    if error or text[end:].strip():
        value = _python_value(text)
        if isinstance(value, str):
            return text
    kinds = {"boolean"} if isinstance(value, bool) else {kind for kind in _TYPES if isinstance(value, _TYPES[kind])}
    return text if "string" in types and not types & kinds - {"string"} else value


def _python_value(text: str) -> Any:
    """The value of a Python literal that is True, False, None, or a list, tuple or dict in JSON's types; else the
    text."""
    try:
        value = ast.literal_eval(text.strip())
        if value is None or isinstance(value, bool | list | tuple | dict):
            value, _, error = parse_json(json.dumps(value, allow_nan=False), 0)
            return text if error else value
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    return text


# -- The format of a chat template ------------------------------------------------------------------------------------

FORMATS: tuple[Format, ...] = (
    read_hermes, read_function_tags, read_argument_tags, read_mistral, read_deepseek, read_llama,
)  # fmt: skip
EXAMPLE = ToolCall("call00000", "tool_name", {"argument": "value"})
"""The probe, and the example shown to policies."""


CallForm = Callable[[str, Sequence[ToolCall]], dict[str, Any]]
"""A function that builds the message that a template takes for content and calls."""


def _with_calls(placeholder: str | None, as_text: bool, content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message: `placeholder` in place of an empty content, arguments as text with `as_text`."""
    message = Message("assistant", (), tuple(calls)).as_dict() | {"content": content or placeholder}
    for call in message["tool_calls"] if as_text else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message


def find_format(turn: Callable[[dict[str, Any]], str]) -> tuple[CallForm, Format] | None:
    """Find the form in which a chat template takes calls and the format in which it writes them, by rendering `EXAMPLE`
    with `turn`. None if it writes no calls, or in an unknown format."""
    tools = {EXAMPLE.name: ToolSpec(EXAMPLE.name, "", {"properties": {"argument": {"type": "string"}}})}
    for placeholder in ("", None):
        for as_text in (False, True):
            form = partial(_with_calls, placeholder, as_text)
            text = turn(form("", [EXAMPLE]))
            for reader in FORMATS:
                reading = reader(text, tools)
                calls = [(call.name, call.arguments) for call in reading.calls]
                if reading.is_complete and calls == [(EXAMPLE.name, EXAMPLE.arguments)]:
                    return form, reader
    return None
