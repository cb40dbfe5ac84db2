"""Short hashes of code, tasks and models, which tell results apart, and seeds made by hashing."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from .hub import fetched_model
from .types import Task

DIGITS = 16
"""Hexadecimal digits of a fingerprint: 64 bits."""
PIECE = 2**16
PIECES = 64
"""Number of evenly spaced pieces of a weights file that are hashed. Training changes every weight, so the pieces change
too, and a model of hundreds of gigabytes costs no more than a small one."""
SMALL = 2**24
"""Maximum bytes of a file that is hashed in full."""


def text_hash(text: str) -> str:
    """A fingerprint of `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def derived_seed(*parts: object) -> int:
    """A seed in [0, 2^31) that depends on all `parts`, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone: the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


def source_hash(classes: Iterable[type]) -> str:
    """A fingerprint of the source files that define `classes`; for a class in a package's `__init__`, of the whole
    package with its YAML files. Empty without readable source."""
    names = {cls.__module__ for cls in classes}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return _files_hash(frozenset(file for file in files if file))


@functools.cache  # this process has imported the files as they were
def _files_hash(files: frozenset[str]) -> str:
    sources: set[Path] = set()
    for file in map(Path, files):
        files_in_package = (path for path in file.parent.rglob("*") if path.suffix in (".py", ".yaml"))
        sources.update(files_in_package if file.name == "__init__.py" else [file])
    digest = hashlib.sha256()
    for path in sorted(sources):
        try:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        except OSError:  # defined in a notebook or interactively
            continue
    return digest.hexdigest()[:DIGITS] if sources else ""


def task_hash(task: Task) -> str:
    """A fingerprint of a task's prompt, reference answer, fields and seed."""
    prompt = task.prompt if isinstance(task.prompt, str) else [message.as_dict() for message in task.prompt]
    return text_hash(json.dumps([prompt, task.answer, dict(task.fields), task.seed], sort_keys=True, default=str))


def model_hash(model: str) -> str | None:
    """The hash of a model's configuration, tokenizer and weights, in its folder or, for a hub id, in the local cache.
    None without a folder: an API's model."""
    folder = Path(model) if Path(model).is_dir() else fetched_model(model)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin", ".model", ".jinja") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= SMALL:
                digest.update(file.read())
                continue
            for piece in range(PIECES):
                file.seek((size - PIECE) * piece // (PIECES - 1))
                digest.update(file.read(PIECE))
    return digest.hexdigest()[:DIGITS]
