"""Reading a model folder: its check, and its end-of-turn tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envgym.errors import ConfigError


def check_model_folder(model: str) -> None:
    """Raise `ConfigError` for a path without a causal language model. Hub ids are not checked."""
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise ConfigError(f"there is no model folder {model!r}")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{model!r} is not a model folder: it has no config.json")
    try:
        architectures = json.loads(config.read_bytes()).get("architectures") or []
    except (ValueError, AttributeError):
        raise ConfigError(f"{str(config)!r} is not a JSON object") from None
    if architectures and not any(name.endswith(("LM", "LMHeadModel", "Generation")) for name in architectures):
        raise ConfigError(f"{model!r} holds a {architectures[0]}, which is not a causal language model")


def end_tokens(config: Any, model: str) -> tuple[int, ...]:
    """The ids that end a turn, sorted: the end-of-sequence tokens of the model's config and generation config."""
    from transformers import GenerationConfig

    token_ids: set[int] = set()
    try:
        generation = GenerationConfig.from_pretrained(model)
    except OSError:  # many models have none
        generation = None
    for source in (config, generation):
        value = getattr(source, "eos_token_id", None)
        token_ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(token_ids))
