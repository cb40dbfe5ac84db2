"""The share of what training changed that a number format keeps.

Training moves a weight by little: twelve steps of AdamW at 2e-5 by 0.0002, and a weight of 0.1 in bfloat16, with its 8
binary digits, has its neighbours at a distance of 0.0005. Rounded, most of such weights are the base's again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ENOUGH = 0.9
"""The least share of a change that a number format of fewer digits must keep to be chosen without being asked for."""
MOST_NUMBERS = 2**20
"""Numbers of a tensor that are compared, evenly spaced: enough for a share to the percent."""


class WeightChange:
    """The change of weights by training, and what is left of it in the number format `dtype`, tensor by tensor."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._exact = self._projected = 0.0
        self._n_changed = self._n_equal = 0

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Count a tensor before and after training, of the same shape."""
        stride = max(1, old.numel() // MOST_NUMBERS)
        old, new = (tensor.detach().reshape(-1)[::stride].float() for tensor in (old, new))
        exact, rounded = new - old, new.to(self.dtype).float() - old.to(self.dtype).float()
        self._exact += float((exact * exact).double().sum())
        self._projected += float((exact * rounded).double().sum())
        self._n_changed += int((exact != 0).sum())
        self._n_equal += int(((exact != 0) & (rounded == 0)).sum())

    @property
    def share(self) -> float:
        """The share of the change that is kept, 0 to 1: the rounded change's component along the exact one. 1 if
        nothing changed."""
        return min(1.0, max(0.0, self._projected / self._exact)) if self._exact else 1.0

    @property
    def in_words(self) -> str:
        name, equals = str(self.dtype).removeprefix("torch."), self._n_equal / max(1, self._n_changed)
        share = f"{name} keeps {self.share:.0%} of what training changed"
        return f"{share}: rounded, {equals:.0%} of the changed weights equal the base's"


def change_between(base: Path, trained: Path, dtype: str) -> WeightChange:
    """The change by training between two model folders with safetensors files, over the tensors that both have."""
    import torch

    change, old = WeightChange(getattr(torch, dtype)), _tensors(base)
    for name, tensor in _tensors(trained).items():
        if name in old and old[name].shape == tensor.shape and tensor.is_floating_point():
            change.add(old[name], tensor)
    return change


def _tensors(folder: Path) -> dict[str, Any]:
    """The tensors in a folder's safetensors files, mapped into memory."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
