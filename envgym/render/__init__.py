"""Rendering: observations to token ids, and a policy's token ids back to text and tool calls.

Two implementations of one interface: the tokenizer's own chat template, and plain text for models without one. Sampled
tokens are never rendered again: they stay as the engine returned them, and later observations are appended, or begin a
new token sequence if the template would render the earlier turns differently.
"""

from collections.abc import Mapping
from typing import Any

from .chat import ChatRenderer
from .config import RenderConfig, RenderKind
from .renderer import Dialogue, Extension, NoRenderer, Renderer, load_tokenizer
from .text import RawRenderer, TextRenderer

__all__ = [
    "ChatRenderer", "Dialogue", "Extension", "NoRenderer", "RawRenderer", "RenderConfig", "RenderKind", "Renderer",
    "TextRenderer", "load_renderer", "load_tokenizer", "make_renderer",
]  # fmt: skip


def load_renderer(model: str, config: RenderConfig) -> Renderer:
    """The renderer of a model folder or hub id."""
    tokenizer = load_tokenizer(model)
    config.set_template(tokenizer)
    return make_renderer(config.kind, tokenizer, keep_thoughts=config.keep_thoughts, image_size=config.image_size)


def make_renderer(
    kind: RenderKind, tokenizer: Any, *, keep_thoughts: bool = False, image_size: Mapping[str, int] | None = None
) -> Renderer:
    """The renderer of a kind; `auto` takes the tokenizer's chat template if it has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer, keep_thoughts=keep_thoughts, image_size=image_size)
    return RawRenderer(tokenizer) if kind == "raw" else TextRenderer(tokenizer)
