"""Messages as other programs write them: their names of roles, calls as turns of their own, thoughts in a field of
their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .images import KINDS, ImagePart, image_of

CALL = "function_call"
"""The role of a turn that is a call, in ShareGPT's files."""
ROLES = {
    "user": "user", "human": "user", "prompter": "user", "system": "system",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant",
    "ai": "assistant",
    "tool": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool", "tool_result": "tool",
    "observation": "tool", "ipython": "tool",
    "function_call": CALL, "tool_call": CALL, "tool_calls": CALL,
}  # fmt: skip
"""Roles by their names in the usual formats, in lower case."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Fields of an assistant's message that hold its thought."""
THINK, END_OF_THOUGHT = "<think>", "</think>"


def known_role(name: str) -> str:
    """The role that a name stands for; a name that is unknown here, or means more than one thing, stays."""
    return ROLES.get(name.strip().lower(), name)


def texts_of(content: Any) -> list[str]:
    """The texts of a message's content, which is text or a list of parts. Raises `TypeError` for a part that is no
    text, such as an image."""
    return [_text_of(part) for part in _parts(content)]


def parts_of(content: Any) -> list[str | ImagePart]:
    """The texts and images of a message's content, which is text or a list of parts. Raises `TypeError` for a part that
    is neither, and `ValueError` for a file that is no image."""
    return [_image_of(part) or _text_of(part) for part in _parts(content)]


def _parts(content: Any) -> Sequence[Any]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise TypeError(f"the content of a message is text or a list of its parts, not {type(content).__name__}")
    return content


def _image_of(part: Any) -> ImagePart | None:
    if isinstance(part, ImagePart):
        return part
    return image_of(part) if isinstance(part, Mapping) and part.get("type") in KINDS else None


def _text_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get("text", part.get("value") if kind == "text" else None) if isinstance(part, Mapping) else part
    if isinstance(value, str):
        return value
    if kind in ("thinking", "reasoning"):  # a thought among the parts, as text or as parts
        thought = "".join(texts_of(part.get("thinking") or part.get("reasoning") or ""))
        return f"{THINK}\n{thought.strip()}\n{END_OF_THOUGHT}\n\n" if thought.strip() else ""
    name = f"of type {kind!r}" if kind else f"{part!r:.60}"
    raise TypeError(f"a message has a part {name}, which is not read here: leave out rows with such parts")


def with_thought(item: Mapping[str, Any], parts: list[str | ImagePart]) -> list[str | ImagePart]:
    """The parts of an assistant's message with the thought that a field of it holds, between `<think>` and `</think>`:
    the renderer gives it to a template that takes it elsewhere."""
    thought = next((item[name] for name in THOUGHTS if isinstance(item.get(name), str) and item[name].strip()), "")
    if not thought or any(isinstance(part, str) and END_OF_THOUGHT in part for part in parts):
        return parts
    return [f"{THINK}\n{thought.strip()}\n{END_OF_THOUGHT}\n\n", *parts]


def called_in(content: Any) -> tuple[str, list[Any]]:
    """A turn that is a call: the text before it, and the calls, `{"name": …, "arguments": …}`. It may be JSON text.
    Raises `ValueError` for a text without one."""
    if not isinstance(content, str):
        return "", content if isinstance(content, list) else [content]
    thought, mark, turn = content.rpartition(END_OF_THOUGHT)
    for start in sorted(turn.find(bracket) for bracket in "{[" if bracket in turn):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(turn[start:])
            return f"{thought}{mark}{turn[:start]}".strip(), value if isinstance(value, list) else [value]
    raise ValueError(f'a turn that calls a function is JSON, {{"name": …, "arguments": {{…}}}}, not {content!r:.60}')
