"""Models as files: folders with a config and weights, new ones, weight files, their sizes and number formats,
and export.

The model that is trained is in `workers/`, the engine's in `engines/`, and `jobs/models.py` starts engines of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envgym.errors import ConfigError


def is_path(name: str) -> bool:
    """True if a model's name can only be the path of a folder, not the id of a model on a hub."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def capped_attention(config: Any) -> str | None:
    """The attention, by transformers' name, that applies the cap of attention logits in a Hugging Face config; None
    without a cap. Transformers' default, `sdpa`, would leave it out."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def check_no_file(name: str) -> None:
    """Raise `ConfigError` if a model's name is the path of a file."""
    path = Path(name).expanduser()
    if path.is_file():
        hint = f". Did you mean {path.parent}?" if (path.parent / "config.json").is_file() else ""
        raise ConfigError(f"{name} is a file, and a model is the folder with config.json and weights{hint}")
