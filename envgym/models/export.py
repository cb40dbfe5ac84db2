"""Models for other programs: a folder in another number format, or a GGUF file by the user's converter."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from envgym.disk import work_folder
from envgym.errors import ConfigError, needs, reported_as

from .rounding import change_between
from .sizes import number_format_of
from .weights_file import save_model

GGUF = ".gguf"
OUTTYPES: dict[str, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""The names of number formats for llama.cpp's converter."""


def export_model(
    model: Path, target: Path, dtype: str | None, converter: str | None, note: Callable[[str], None], base: Path | None
) -> Path:
    """Write `model`, a Hugging Face folder, with its weights in `dtype`: as a folder, or if `target` ends with .gguf by
    `converter`, which is called like llama.cpp's: `CONVERTER FOLDER --outfile TARGET --outtype TYPE`.

    By default weights keep their number format, because one with fewer digits may undo a training. `note` is called
    with what is left of the training in `dtype`, compared with `base`, the folder of the model before it. A GGUF file
    is read back, and `note` is called if its chat template is not the tokenizer's. Raises `ConfigError`.
    """
    if target.exists():
        raise ConfigError(f"{target} exists: give the exported model another name")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no model: there is no config.json in it")
    if (target.suffix == GGUF) != (converter is not None):
        wants = "a file that ends with .gguf" if converter else "--converter, the command that writes GGUF files"
        raise ConfigError(f"exporting {target.name} needs {wants}")
    stored = number_format_of(model)
    dtype = dtype or stored or "float32"
    if words := rounding_in_words(model, dtype, base):
        note(words if stored is None else f"{words}; --dtype {stored} keeps all of it")
    with reported_as(ConfigError, f"{target} cannot be written"):
        if converter is None:
            with work_folder(target) as temporary:
                write_folder(model, temporary, dtype)
                os.replace(temporary, target)
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
            write_folder(model, Path(folder), dtype)
            convert(Path(folder), target, dtype, converter)
            check_template(Path(folder), target, note)
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
    loaded = getattr(transformers, name, transformers.AutoModelForCausalLM)
    save_model(loaded.from_pretrained(model, dtype=getattr(torch, dtype)), target)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(target)


def convert(folder: Path, target: Path, dtype: str, converter: str) -> None:
    """Run the user's converter."""
    command = [*shlex.split(converter), str(folder), "--outfile", str(target), "--outtype", OUTTYPES[dtype]]
    with reported_as(ConfigError, f"the converter {command[0]} does not start"):
        process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if process.returncode or not target.is_file():
        reason = (process.stderr.strip() or process.stdout.strip() or "no output").splitlines()[-1]
        raise ConfigError(
            f"the converter ended with exit status {process.returncode} and wrote no {target.name}: {reason[:300]}"
        )


def check_template(folder: Path, target: Path, note: Callable[[str], None]) -> None:
    """Compare the chat template in a GGUF file, which other programs render with, to the tokenizer's."""
    import transformers

    with needs("gguf", "gguf", f"reading {target.name} back"):
        from gguf import GGUFReader
    field = GGUFReader(target).get_field("tokenizer.chat_template")
    exported = None if field is None else str(field.contents())
    template = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    if exported != template:
        note(f"the chat template in {target.name} is not the tokenizer's: programs will render prompts differently")
