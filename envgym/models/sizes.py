"""The size of a model, from the headers of its weight files."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path


def count_parameters(folder: Path) -> int:
    """Number of parameters in a folder's safetensors files; 0 if there are none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            count += prod(tensor.get("shape", ())) if name != "__metadata__" else 0
    return count
