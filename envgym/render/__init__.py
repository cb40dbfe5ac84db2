"""Rendering: observations to token ids, and a policy's token ids back to text and tool calls.

Two implementations of one interface: the tokenizer's own chat template, and plain text for models without one. Sampled
tokens are never rendered again: they stay as the engine returned them, and later observations are appended, or begin a
new token sequence if the template would render the earlier turns differently.
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
    """The renderer of a kind; `auto` takes the tokenizer's chat template if it has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer)
    return RawRenderer(tokenizer) if kind == "raw" else TextRenderer(tokenizer)
