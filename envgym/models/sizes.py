"""The size and the number format of a model, from the headers of its weight files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from operator import index
from pathlib import Path

from envgym.disk import regular_file
from envgym.errors import ConfigError, reported_as

MAX_HEADER = 100_000_000
"""Maximum bytes of a header, as in safetensors' own library."""
FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""torch's names of number formats by those of safetensors."""


def count_parameters(folder: Path, pattern: str = "") -> int:
    """Number of parameters in a folder's safetensors files whose names match a regular expression from their beginning;
    0 if there are none. Raises `ConfigError` for files that are none."""
    return sum(size for name, _, size in _tensors(folder) if re.match(pattern, name))


def number_format_of(folder: Path) -> str | None:
    """The number format (`float32`) of most numbers in a folder's safetensors files; None without such files, and for
    formats of fewer bits than 16. Raises `ConfigError` for files that are none."""
    counts: Counter[str] = Counter()
    for _, dtype, size in _tensors(folder):
        counts[dtype] += size
    return FORMATS.get(max(counts, key=counts.__getitem__)) if counts else None


def _tensors(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Name, number format and size of each tensor in a folder's safetensors files, from their headers."""
    for path in folder.glob("*.safetensors"):
        with reported_as(ConfigError, f"{path} is no file of weights", cause=Exception):
            with regular_file(path).open("rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER)))
            tensors = [(name, tensor) for name, tensor in header.items() if name != "__metadata__"]
            sizes = [(name, str(tensor["dtype"]), prod(map(index, tensor["shape"]))) for name, tensor in tensors]
        yield from sizes
