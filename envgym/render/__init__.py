"""Rendering: observations to token ids, and a policy's token ids back to text and tool calls.

One interface, twice: the tokenizer's own chat template, and plain text for models that have none. What the policy
sampled is never rendered again: its token ids are kept as the engine returned them, and what an environment says
later is appended to them, or begins a new row where the template would have it otherwise.
"""

from typing import Any, Literal

from .chat import ChatRenderer
from .dialogue import Dialogue, Extension
from .renderer import NoRenderer, Renderer, load_tokenizer
from .text import RawRenderer, TextRenderer

RenderKind = Literal["auto", "chat", "text", "raw"]

__all__ = [
    "ChatRenderer", "Dialogue", "Extension", "NoRenderer", "RawRenderer", "RenderKind", "Renderer", "TextRenderer",
    "load_tokenizer", "make_renderer",
]  # fmt: skip


def make_renderer(kind: RenderKind, tokenizer: Any) -> Renderer:
    """The renderer of a kind; `auto` takes the chat template where the tokenizer has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer)
    return RawRenderer(tokenizer) if kind == "raw" else TextRenderer(tokenizer)
