"""Vision-language models: transformers' class for one, its parts that texts do not reach, its processor's files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.hub import optional_file

if TYPE_CHECKING:
    from torch import nn

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""The files of a processor, which makes tensors of images, beside those of its tokenizer and the chat template."""
TOWERS = r"(.*\.)?(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|connector|projector)\..*"
"""Names of weights that texts do not reach, in checkpoints: of the towers that see images and what connects them."""


def takes_images(config: Any) -> bool:
    """True for the Hugging Face config of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def placeholder_ids(config: Any) -> frozenset[int]:
    """The ids of the tokens that stand for images and videos, of the Hugging Face config of a model."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return frozenset(token for name in names if isinstance(token := getattr(config, name, None), int))


def policy_class(config: Any) -> Any:
    """transformers' class that loads a policy with this Hugging Face config."""
    import transformers

    with_images = transformers.AutoModelForImageTextToText
    is_known = takes_images(config) and type(config) in with_images._model_mapping
    return with_images if is_known else transformers.AutoModelForCausalLM


def vision_pattern(model: nn.Module) -> str:
    """A regular expression of the names of modules and parameters that texts do not reach in `model` (from Hugging
    Face), the vision tower and what connects it to the language model. It matches nothing in a language model, nor
    where transformers does not tell the two apart."""
    if not takes_images(model.config) or model.base_model in (model, model.get_decoder()):
        return r"(?!)"
    names = map(re.escape, _names_beside(model.base_model, model.get_decoder(), f"{model.base_model_prefix}."))
    return rf"({'|'.join(names)})(\..*)?"


def _names_beside(module: nn.Module, part: nn.Module, prefix: str) -> Iterator[str]:
    """The names of the largest modules of `module`, and of its parameters outside of them, that hold nothing of its
    `part`."""
    yield from (prefix + name for name, _ in module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if child is not part and any(descendant is part for descendant in child.modules()):
            yield from _names_beside(child, part, f"{prefix}{name}.")
        elif child is not part:
            yield prefix + name


def save_tokenizer(tokenizer: Any, folder: Path, model: str = "") -> None:
    """Save a tokenizer into the folder of a saved model. A vision-language model gets the files of the processor of
    `model` (a folder or hub id), by default the one whose tokenizer it is. They are copied: to load a processor takes
    packages that texts do not need."""
    tokenizer.save_pretrained(folder)
    if json.loads((folder / "config.json").read_bytes()).get("vision_config") is None:
        return
    for name in PROCESSOR_FILES:
        if file := optional_file(model or tokenizer.name_or_path, name):
            shutil.copyfile(file, folder / name)
