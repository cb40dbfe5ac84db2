"""Short hashes of what was played (code, settings, tasks), by which results are compared, and seeds made by hashing."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .types import Episode, Task

if TYPE_CHECKING:
    from .env import EnvSpec

DIGITS = 16
"""Hexadecimal digits of a fingerprint: 64 bits."""


def text_hash(text: str) -> str:
    """A fingerprint of `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def derived_seed(*parts: object) -> int:
    """A seed in [0, 2^31) that depends on all `parts`, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def source_hash(classes: Iterable[type]) -> str:
    """A fingerprint of the source files that define `classes`: of the whole package where one is defined in its
    `__init__`. Empty where there is no source to be read."""
    names = {cls.__module__ for cls in classes}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return _files_hash(frozenset(file for file in files if file))


@functools.cache  # what this process imported stays as it was read
def _files_hash(files: frozenset[str]) -> str:
    sources: set[Path] = set()
    for file in map(Path, files):
        sources |= set(file.parent.rglob("*.py")) if file.name == "__init__.py" else {file}
    digest = hashlib.sha256()
    for path in sorted(sources):
        try:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        except OSError:  # defined in a notebook or typed in
            continue
    return digest.hexdigest()[:DIGITS] if sources else ""


def task_hash(task: Task) -> str:
    """A fingerprint of what a task asks and of what answers it."""
    prompt = task.prompt if isinstance(task.prompt, str) else [message.as_dict() for message in task.prompt]
    return text_hash(json.dumps([prompt, task.answer, dict(task.fields), task.seed], sort_keys=True, default=str))


def first_change(
    episodes: Iterable[Episode], tasks: Mapping[str, Task], spec: EnvSpec
) -> tuple[Episode, EnvSpec | None] | None:
    """The first of `episodes` that was not played on what there is now: with None where its group is posed another of
    the `tasks` (by group), else with the environment whose code or settings have changed. None where all were."""
    known: dict[int, dict[str, str]] = {}
    for episode in episodes:
        task = tasks.get(episode.group)
        if task is None or episode.fingerprints.get("task") != task_hash(task):
            return episode, None
        part = spec.of(task)
        now = known.get(id(part)) or known.setdefault(id(part), part.fingerprint())
        if any(episode.fingerprints.get(name) != value for name, value in now.items()):
            return episode, part
    return None
