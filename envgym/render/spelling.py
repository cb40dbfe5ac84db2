"""Escaping of special tokens that are spelled out in text. In text by the policy, a tool or another player `<|im_end|>`
is ten characters: otherwise its author could end the turn and begin another role's.

Before such text is encoded here, a `BREAK` is inserted into every spelled-out added token. It keeps the tokenizer from
finding that token, and is removed before the rest of the text is encoded. For APIs, which parse text themselves, a
space is inserted instead.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.types import ImagePart, Message, TextPart, ToolSpec

BREAK = "\ufdd0\ufdef"
"""Two code points that Unicode reserves as noncharacters. They are removed from a text that contains them."""
POLICYS = frozenset(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
)
"""Marks of thoughts and calls, which a policy may generate: in its own text they stay unescaped."""
_NAMES = "bos|eos|eot|eod|eoh|eoa|sop|eop|pad|unk|cls|sep|mask"
_FORMS = r"\w{0,32}unused\w{0,32}|(extra_id|reserved|special)_\d+|(start|begin|end)_of_\w{1,32}|(fim_|seed:)\w{1,32}"
IN_APIS = re.compile(
    r"<(?=[|｜][^<>]{1,64}[|｜]>|[|｜][/\w][^<>|\s]{0,64}>|\w[^<>|\s]{0,64}[|｜]>"  # <|im_end|>, <|turn>, <turn|>
    rf"|/?s>|/?(?i:({_NAMES})(_token)?|{_FORMS}|tool_response)>)"
    r"|\[(?=[|｜][\w-]{2,64}[|｜]\]|/?(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_(CALLS|RESULTS|CONTENT)|MODEL_SETTINGS"
    rf"|ARGS|CALL_ID|IMG(_BREAK|_END)?|gMASK|{_NAMES.upper()}|(?i:{_FORMS}))\])"
    r"|[\[\]](?=~!?b[\[\]]|e~\[|<\])"  # ]~b], [e~[
)
"""The beginning of a spelled-out special token, for unknown tokenizers: a word between brackets and bars, and the names
that models' developers give to such tokens."""


def escape_for_api(text: str) -> str:
    """Insert a space into every spelled-out special token."""
    return IN_APIS.sub(r"\g<0> ", text)


def mark_from_others(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Mark messages as written by others (`from_others`)."""
    return tuple(replace(message, from_others=True) for message in messages)


def mark_after_prompt(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Mark the messages from the first assistant's on as written by others."""
    first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return (*messages[:first], *mark_from_others(messages[first:]))


def rewrite(message: Message, change: Callable[[str], str]) -> Message:
    """Apply `change` to all text of a message by others, and remove the mark `from_others`; other messages stay."""
    if not message.from_others and message.role != "tool":
        return message
    calls = tuple(
        replace(call, id=change(call.id), name=change(call.name), arguments=_apply(call.arguments, change))
        for call in message.tool_calls
    )
    names: dict[str, Any] = {name: change(getattr(message, name)) for name in ("role", "tool_call_id", "name")}
    content: list[TextPart | ImagePart] = []
    for is_text, run in itertools.groupby(message.content, lambda part: isinstance(part, TextPart)):
        parts = list(run)  # a token may be spelled across adjacent texts
        content += [TextPart(change("".join([part.text for part in parts])))] if is_text else parts
    names["content"] = tuple(content) or (TextPart(""),)
    return replace(message, tool_calls=calls, from_others=False, **names)


def rewrite_tools(tools: Iterable[ToolSpec], change: Callable[[str], str]) -> tuple[ToolSpec, ...]:
    """Apply `change` to all text of tools, which may be a server's: name, description, and the schema at any depth."""
    return tuple(ToolSpec(*_apply([tool.name, tool.description, tool.parameters], change)) for tool in tools)


def _apply(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {_apply(key, change): _apply(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_apply(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


class Speller:
    """Inserts `BREAK`s into spelled-out added tokens of a tokenizer (`added_tokens_decoder`): special tokens and tokens
    in brackets. Other added tokens are ordinary words or spaces."""

    def __init__(self, decoder: Mapping[int, Any]) -> None:
        texts = [
            str(token.content) for token in decoder.values() if token.special or str(token.content)[:1] in ("<", "[")
        ]
        self._tokens = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
        self._beginnings = {token[:2] for token in self._tokens}
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")

    def escape_policy_text(self, text: str) -> str:
        """Escape all added tokens in the policy's own text, except `POLICYS`."""
        return self.escape(text, POLICYS)

    def escape(self, text: str, but: frozenset[str] = frozenset()) -> str:
        """Escape all added tokens in a text, except those in `but`."""

        def escape_token(match: re.Match[str]) -> str:
            token = match.group()
            return token if token in but else f"{token[0]}{BREAK}{token[1:]}"

        previous = ""
        while text != previous and self._is_spelled_in(text):
            previous, text = text, self._pattern.sub(escape_token, text)  # again, for overlapping tokens
        return text

    def _is_spelled_in(self, text: str) -> bool:
        # A thousand tokens may have few beginnings: most texts contain none of these.
        return any(start in text for start in self._beginnings) and any(token in text for token in self._tokens)
