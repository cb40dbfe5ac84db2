"""Models for other programs: a folder in 16 bit, and a GGUF file by the converter that the user names."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from envgym.disk import unfinished
from envgym.errors import ConfigError, needs, reported_as

Dtype = Literal["bfloat16", "float16", "float32"]
GGUF = ".gguf"
OUTTYPES: dict[str, str] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""Names that llama.cpp's converter has for number formats."""


def export_model(model: Path, out: Path, dtype: Dtype, converter: str | None, note: Callable[[str], None]) -> Path:
    """Write `model`, a Hugging Face folder, with its weights in `dtype`: as such a folder or, where `out` ends with
    .gguf, by `converter`, which is called as llama.cpp's is: `CONVERTER FOLDER --outfile OUT --outtype TYPE`.

    A GGUF file is read back: its chat template must be the tokenizer's. Raises `ConfigError` in one line.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give the exported model another name")
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no model: there is no config.json in it")
    if (out.suffix == GGUF) != (converter is not None):
        wants = "a file that ends with .gguf" if converter else "--converter, the command that writes GGUF files"
        raise ConfigError(f"exporting {out.name} needs {wants}")
    with reported_as(ConfigError, f"{out} cannot be written"):
        if converter is None:
            with unfinished(out) as made:
                write_folder(model, made, dtype)
                os.replace(made, out)
            return out
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
            write_folder(model, Path(folder), dtype)
            convert(Path(folder), out, dtype, converter)
            check_template(Path(folder), out, note)
    return out


def write_folder(model: Path, out: Path, dtype: Dtype) -> None:
    """Write the model and its tokenizer with weights in `dtype`, without loading code of the model's own."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model)
    name = (config.architectures or [""])[0]
    loaded = getattr(transformers, name, transformers.AutoModelForCausalLM)
    loaded.from_pretrained(model, dtype=getattr(torch, dtype)).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(out)


def convert(folder: Path, out: Path, dtype: Dtype, converter: str) -> None:
    """Run the user's converter."""
    command = [*shlex.split(converter), str(folder), "--outfile", str(out), "--outtype", OUTTYPES[dtype]]
    with reported_as(ConfigError, f"the converter {command[0]} does not start"):
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode or not out.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
        raise ConfigError(
            f"the converter ended with exit status {done.returncode} and wrote no {out.name}: {last[:300]}"
        )


def check_template(folder: Path, out: Path, note: Callable[[str], None]) -> None:
    """Compare the chat template in a GGUF file with the tokenizer's: other programs render by it."""
    import transformers

    with needs("gguf", "gguf", f"reading {out.name} back"):
        from gguf import GGUFReader
    field = GGUFReader(out).get_field("tokenizer.chat_template")
    written = None if field is None else str(field.contents())
    template = transformers.AutoTokenizer.from_pretrained(folder).chat_template
    if written != template:
        note(f"the chat template in {out.name} is not the tokenizer's: programs that read it will render otherwise")
