"""What a model's name can be: a folder's path, or `name` or `owner/name` on a hub."""

from __future__ import annotations

from pathlib import Path


def is_path(name: str) -> bool:
    """Whether a name can only be meant as a folder's path, which no hub has a model under."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
