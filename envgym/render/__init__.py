"""Rendering: observations to token ids, and a policy's token ids back to text and tool calls.

One interface, twice: the tokenizer's own chat template, and plain text for models that have none. What the policy
sampled is never rendered again: its token ids are kept as the engine returned them, and what an environment says
later is appended to them, or begins a new row where the template would have it otherwise.
"""

from .chat import ChatRenderer
from .dialogue import Dialogue, Extension
from .load import RenderKind, load_tokenizer, make_renderer
from .renderer import NoRenderer, Renderer
from .text import TextRenderer

__all__ = [
    "ChatRenderer",
    "Dialogue",
    "Extension",
    "NoRenderer",
    "RenderKind",
    "Renderer",
    "TextRenderer",
    "load_tokenizer",
    "make_renderer",
]
