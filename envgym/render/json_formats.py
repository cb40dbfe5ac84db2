"""Tool calls as JSON: the formats of Hermes and Qwen, of Llama 3, of Mistral and of DeepSeek."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from envgym.types import ToolCall, ToolSpec

from .reading import Reading, call_at, call_of, json_at, malformed, skip_space


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
