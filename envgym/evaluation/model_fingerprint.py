"""A short hash of a model folder, by which results of one name can be told apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from envgym.hashing import DIGITS

PIECE = 2**16
PIECES = 64
"""Pieces of a weights file that are read, evenly spaced: training changes every weight, so what is read changes too,
and a model of hundreds of gigabytes costs no more than a small one."""
SMALL = 2**24
"""Bytes of a file that is read whole."""


def model_fingerprint(model: str) -> str | None:
    """The hash of a model folder's configuration, tokenizer and weights; of a hub id, of what was fetched of it. None
    where there is no folder: an API's model."""
    folder = Path(model) if Path(model).is_dir() else _fetched(model)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin", ".model", ".jinja"):
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


def _fetched(model: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not installed, no hub id, or nothing of it here
        return None
