"""Which tokenizer and which renderer a model gets."""

from __future__ import annotations

import logging
from typing import Any, Literal

from envgym.errors import ConfigError, missing_package

from .chat import ChatRenderer
from .renderer import Renderer
from .text import TextRenderer

RenderKind = Literal["auto", "chat", "text"]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises `ConfigError` where there is none."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing_package("transformers", "train", "rendering prompts") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry; the line below says all
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]  # its first line may end with "one of:"
        raise ConfigError(f"model {model}: its tokenizer cannot be loaded ({reason})") from None


def make_renderer(kind: RenderKind, tokenizer: Any) -> Renderer:
    """The renderer of a kind; `auto` takes the chat template where the tokenizer has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer)
    return TextRenderer(tokenizer)
