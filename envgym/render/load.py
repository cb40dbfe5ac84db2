"""Loading a model's tokenizer and choosing its renderer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from envgym.errors import ConfigError, missing_package

from .chat import ChatRenderer
from .renderer import Renderer
from .text import TextRenderer

RenderKind = Literal["auto", "chat", "text"]


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model folder or hub id. Raises `ConfigError` where there is none."""
    try:
        # With the class that most tokenizers have, torch and all of transformers' models need not be imported.
        if _is_common(Path(model)):
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
    except ImportError:
        raise missing_package("transformers", "train", "rendering prompts") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each retry; the line below says all
    try:
        return Tokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]  # its first line may end with "one of:"
        raise ConfigError(f"model {model}: its tokenizer cannot be loaded ({reason})") from None


def _is_common(folder: Path) -> bool:
    """True where a folder's tokenizer is of transformers' common class, which `tokenizer.json` describes."""
    try:
        saved = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(saved, dict) or "auto_map" in saved or not (folder / "tokenizer.json").is_file():
        return False
    return saved.get("tokenizer_class") == "TokenizersBackend"


def make_renderer(kind: RenderKind, tokenizer: Any) -> Renderer:
    """The renderer of a kind; `auto` takes the chat template where the tokenizer has one."""
    if kind == "chat" or (kind == "auto" and tokenizer.chat_template):
        return ChatRenderer(tokenizer)
    return TextRenderer(tokenizer)
