"""Models for other programs: a folder in another number format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from envgym.disk import work_folder
from envgym.errors import ConfigError, reported_as

from .rounding import change_between
from .sizes import number_format_of
from .vision import policy_class, save_tokenizer
from .weights_file import save_model


def export_model(model: Path, target: Path, dtype: str | None, note: Callable[[str], None], base: Path | None) -> Path:
    """Write `model`, a Hugging Face folder, with its weights in `dtype`, as the folder `target`.

    By default weights keep their number format, because one with fewer digits may undo a training. `note` is called
    with what is left of the training in `dtype`, compared with `base`, the folder of the model before it. Raises
    `ConfigError`.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: give the exported model another name")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no model: there is no config.json in it")
    stored = number_format_of(model)
    dtype = dtype or stored or "float32"
    if words := rounding_in_words(model, dtype, base):
        note(words if stored is None else f"{words}; --dtype {stored} keeps all of it")
    with reported_as(ConfigError, f"{target} cannot be written"), work_folder(target) as temporary:
        write_folder(model, temporary, dtype)
        os.replace(temporary, target)
    return target


def rounding_in_words(model: Path, dtype: str, base: Path | None) -> str:
    """The line about a model that is used in a number format other than that of its weights: the share of the change
    since `base` that is left, or if there is none here, that it was not computed. Empty where nothing is rounded."""
    stored = number_format_of(model)
    if dtype in ("float32", stored):
        return ""
    if base is None:
        return f"{dtype} rounds the {stored or 'weights'}: without the model before training, its loss is not known"
    return change_between(base, model, dtype).in_words


def write_folder(model: Path, target: Path, dtype: str) -> None:
    """Write the model and its tokenizer with weights in `dtype`, without running code from the model's folder."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model)
    name = (config.architectures or [""])[0]
    loaded = getattr(transformers, name, policy_class(config))
    save_model(loaded.from_pretrained(model, dtype=getattr(torch, dtype)), target)
    save_tokenizer(transformers.AutoTokenizer.from_pretrained(model), target)
