"""Special tokens that somebody spells out in text. What the policy, a tool or another player wrote holds none: there
`<|im_end|>` is ten characters, or else whoever writes it could end his turn and begin another's.

Where text becomes tokens here, a `BREAK` is put into what spells an added token. It keeps the tokenizer from finding
that token, and is taken out of the text before the rest of it is encoded. APIs that parse text themselves get a space
instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envgym.types import Message, TextPart

BREAK = "\ufdd0\ufdef"
"""Two code points that Unicode keeps from ever being characters. Where somebody writes them they are left out."""
POLICYS = frozenset(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
)
"""Marks of thoughts and calls, which a policy may write: in its own words they stay what they are."""
IN_APIS = re.compile(
    r"<(?=[|｜][^<>]{1,64}[|｜]>|/?s>|(bos|eos|pad|unk|sop|eop|start_of_turn|end_of_turn|/?tool_response|SPECIAL_\d+)>)"
    r"|\[(?=/?(INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_(CALLS|RESULTS|CONTENT)|MODEL_SETTINGS|gMASK)\])"
)
"""The beginning of what spells a special token of a tokenizer that is not here."""


def broken_up(text: str) -> str:
    """The text with a space in what spells a special token, for APIs."""
    return IN_APIS.sub(r"\g<0> ", text)


def by_others(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The messages, as others' words."""
    return tuple(replace(message, from_others=True) for message in messages)


def after_prompt(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, those from the first answer on as others' words."""
    first = next((at for at, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return (*messages[:first], *by_others(messages[first:]))


def rewritten(message: Message, change: Callable[[str], str]) -> Message:
    """The message with `change` made to all of its words, where others wrote them, and no longer said to be theirs."""
    if not message.from_others and message.role != "tool":
        return message
    calls = tuple(
        replace(call, name=change(call.name), arguments=_changed(call.arguments, change)) for call in message.tool_calls
    )
    return replace(message, content=(TextPart(change(message.text)),), tool_calls=calls, from_others=False)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {change(key): _changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


class Speller:
    """Puts `BREAK`s into what spells one of a tokenizer's added tokens (`added_tokens_decoder`): the special ones and
    those in brackets. Others are words or spaces that somebody added to a vocabulary."""

    def __init__(self, added: Mapping[int, Any]) -> None:
        texts = [
            str(token.content) for token in added.values() if token.special or str(token.content)[:1] in ("<", "[")
        ]
        self._tokens = sorted((text for text in texts if len(text.strip()) > 1), key=len, reverse=True)
        self._beginnings = {token[:2] for token in self._tokens}
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or "(?!)")

    def of_policy(self, text: str) -> str:
        """The policy's own text, in which nothing but `POLICYS` is an added token any more."""
        return self.of_all(text, POLICYS)

    def of_all(self, text: str, but: frozenset[str] = frozenset()) -> str:
        """Text, in which nothing is an added token any more."""

        def broken(match: re.Match[str]) -> str:
            found = match.group()
            return found if found in but else f"{found[0]}{BREAK}{found[1:]}"

        before = ""
        while text != before and self._is_spelled_in(text):
            before, text = text, self._pattern.sub(broken, text)  # again, for what overlaps
        return text

    def _is_spelled_in(self, text: str) -> bool:
        # There may be a thousand tokens, with few beginnings: most texts have none of these.
        return any(start in text for start in self._beginnings) and any(token in text for token in self._tokens)
