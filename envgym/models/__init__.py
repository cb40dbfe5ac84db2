"""Model folders: new ones, their adapters, and merging the two."""

from __future__ import annotations

from pathlib import Path


def is_path(name: str) -> bool:
    """True if a model's name can only be meant as a folder's path, which no hub has a model under."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
