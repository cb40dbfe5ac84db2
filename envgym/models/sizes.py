"""The size and the number format of a model, from the headers of its weight files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""torch's names of number formats by those of safetensors."""


def count_parameters(folder: Path) -> int:
    """Number of parameters in a folder's safetensors files; 0 if there are none."""
    return sum(prod(tensor.get("shape", ())) for tensor in _tensors(folder))


def number_format_of(folder: Path) -> str | None:
    """The number format (`float32`) of most numbers in a folder's safetensors files; None without such files, and for
    formats of fewer bits than 16."""
    counts: Counter[str] = Counter()
    for tensor in _tensors(folder):
        counts[tensor["dtype"]] += prod(tensor["shape"])
    return FORMATS.get(max(counts, key=counts.__getitem__)) if counts else None


def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """The headers of the tensors in a folder's safetensors files: `dtype`, `shape`."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from (tensor for name, tensor in header.items() if name != "__metadata__")
