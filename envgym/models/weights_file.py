"""Weights in safetensors files, and their checksum."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envgym.disk import replacement_file
from envgym.errors import report_full_disk

if TYPE_CHECKING:
    import torch


def write_weights(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors, any device and dtype, to `path`. A reader never sees a half-written file.

    Tensors may share memory (tied embeddings): each is written in full under its own name.
    """
    from safetensors.torch import save_file

    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous().cpu()
        # safetensors rejects shared memory
        separate[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
        addresses.add(tensor.data_ptr())
    with report_full_disk(), replacement_file(Path(path)) as temporary:
        save_file(separate, temporary, metadata={"format": "pt"})


def save_model(model: Any, folder: str | Path, **options: Any) -> None:
    """Call `save_pretrained` of a model, and give the files of its weights, which safetensors makes readable for their
    owner alone, the mode of the config beside them. Raises `RunError` if the disk is full."""
    with report_full_disk():
        model.save_pretrained(folder, **options)
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(Path(folder, "config.json").stat().st_mode)


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """A checksum of all tensors' bytes, names, shapes and dtypes; as fast as memory can be read.

    It is the sum of the tensors' own, so that those of a model's parts add up to the model's, in any order and on any
    device."""
    return sum(
        zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sum_of_words(tensor)}".encode())
        for name, tensor in tensors.items()
    )


def _sum_of_words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's 64-bit words modulo 2**64, xor the CRC of the remaining bytes."""
    import numpy as np
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    n_aligned = len(content) // 8 * 8
    words, tail = content[:n_aligned], content[n_aligned:].cpu().numpy().tobytes()
    if tensor.is_cuda:  # on the device, which reads its memory faster than it sends it
        aligned = words if words.data_ptr() % 8 == 0 else words.clone()
        total = int(aligned.view(torch.int64).sum()) % 2**64
    else:
        total = int(np.add.reduce(words.numpy().view(np.uint64), dtype=np.uint64))
    return total ^ zlib.crc32(tail)
