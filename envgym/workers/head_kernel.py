"""The head's chain over logits as Triton kernels: a slice's logits are read once for log-sum-exp, entropy and targets,
and once, in the backward pass, to write their gradient over them.

`head` has the formulas, and the plain form of both, to which these are compared. Numbers between the output layer's
logits and their gradient are float32.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Arguments of a kernel are pointers, numbers and compile-time constants, which have no types in Python.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits of a row that a program has in registers."""
WARPS = 8


@triton.jit
def _rescale(logits, temperature, scale, cap, CAPPED: tl.constexpr):
    """The logits after scale, cap and temperature, and the slope of the cap."""
    logits = logits.to(tl.float32) * scale
    slope = 1.0
    if CAPPED:
        sigmoid = tl.sigmoid(2 * logits / cap)  # tanh(x) = 2 sigmoid(2 x) - 1
        logits = cap * (2 * sigmoid - 1)
        slope = 4 * sigmoid * (1 - sigmoid)
    return logits / temperature, slope


@triton.jit
def sums_kernel(
    logits_ptr, targets_ptr, temperatures_ptr, maxima_ptr, sums_ptr, means_ptr, target_logits_ptr,
    n_columns, n_targets, first_column, scale, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a row of logits [n_columns] to its running maximum m, sum exp(z - m) and, if `ENTROPY`, sum exp(z - m)
    (z - m); write the logits of those of its targets that are in the slice."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    maximum, total = tl.load(maxima_ptr + row), tl.load(sums_ptr + row)
    mean = tl.load(means_ptr + row)
    for start in range(0, n_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        in_row = columns < n_columns
        logits = tl.load(logits_ptr + row * n_columns + columns, mask=in_row, other=0.0)
        z, _ = _rescale(logits, temperature, scale, cap, CAPPED)
        z = tl.where(in_row, z, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(z, 0))
        powers = tl.exp(z - new_maximum)
        change = tl.exp(maximum - new_maximum)
        if ENTROPY:
            shift = tl.where(total > 0, maximum - new_maximum, 0.0)  # before the first block the maximum is -inf
            centred = tl.where(powers > 0, z - new_maximum, 0.0)
            mean = change * (mean + shift * total) + tl.sum(powers * centred, 0)
        total = change * total + tl.sum(powers, 0)
        maximum = new_maximum
    tl.store(maxima_ptr + row, maximum)
    tl.store(sums_ptr + row, total)
    tl.store(means_ptr + row, mean)
    for number in range(n_targets):
        column = tl.load(targets_ptr + row * n_targets + number) - first_column
        if (column >= 0) & (column < n_columns):
            z, _ = _rescale(tl.load(logits_ptr + row * n_columns + column), temperature, scale, cap, CAPPED)
            tl.store(target_logits_ptr + row * n_targets + number, z)


@triton.jit
def gradient_kernel(
    logits_ptr, targets_ptr, temperatures_ptr, totals_ptr, entropies_ptr, grad_targets_ptr, grad_rows_ptr,
    grad_entropies_ptr, n_columns, n_targets, first_column, scale, cap,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of a row's logits over them."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    in_row = columns < n_columns
    places = logits_ptr + row * n_columns + columns
    logits = tl.load(places, mask=in_row, other=0.0)
    z, slope = _rescale(logits, tl.load(temperatures_ptr + row), scale, cap, CAPPED)
    log_p = z - tl.load(totals_ptr + row)
    factor = -tl.load(grad_rows_ptr + row)
    if ENTROPY:
        factor = factor - tl.load(grad_entropies_ptr + row) * (log_p + tl.load(entropies_ptr + row))
    gradient = tl.exp(log_p) * factor
    for number in range(n_targets):
        column = tl.load(targets_ptr + row * n_targets + number) - first_column
        if (column >= start) & (column < start + BLOCK):
            value = tl.load(grad_targets_ptr + row * n_targets + number)
            gradient += tl.where(columns == column, value, 0.0)
    tl.store(places, (gradient * slope).to(logits_ptr.dtype.element_ty), mask=in_row)


class FusedSums:
    """Sums of a pass over the logits of all slices, per row, as `head._Sums`."""

    def __init__(self, vocabulary: Any, entropy: bool) -> None:
        self._vocabulary, self._entropy = vocabulary, entropy
        self.target_logits = torch.zeros_like(vocabulary.targets, dtype=torch.float32)
        self._maxima = torch.full_like(vocabulary.temperatures, -float("inf"))
        self._sums, self._means = torch.zeros_like(self._maxima), torch.zeros_like(self._maxima)

    @property
    def total(self) -> torch.Tensor:
        """[N] the log-sum-exp of the logits."""
        return self._maxima + self._sums.log()

    @property
    def entropies(self) -> torch.Tensor:
        """[N] log sum exp(z - m) - sum p (z - m), which is L - sum p z."""
        return self._sums.log() - self._means / self._sums

    def add(self, logits: torch.Tensor, part: slice) -> None:
        """Add a slice's logits [N, width] as the output layer gives them."""
        if not len(logits):
            return
        vocabulary = self._vocabulary
        sums_kernel[(len(logits),)](
            logits, vocabulary.targets, vocabulary.temperatures,
            self._maxima, self._sums, self._means, self.target_logits,
            *_numbers(vocabulary, part), ENTROPY=self._entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def write_gradient(
    logits: torch.Tensor, vocabulary: Any, part: slice, total: torch.Tensor, entropies: torch.Tensor | None,
    grad_targets: torch.Tensor, grad_rows: torch.Tensor, grad_entropies: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Write the gradient of a slice's logits [N, width] over them; arguments as of `head._logits_gradient`."""
    if not len(logits):
        return logits
    # Without gradients of entropies the kernel reads neither of the two pointers, and any tensors fill their places.
    entropies, grad_entropies_or_rows = (total, grad_rows) if grad_entropies is None else (entropies, grad_entropies)
    gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
        logits, vocabulary.targets, vocabulary.temperatures, total, entropies, grad_targets, grad_rows,
        grad_entropies_or_rows, *_numbers(vocabulary, part),
        ENTROPY=grad_entropies is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logits


def _numbers(vocabulary: Any, part: slice) -> tuple[int, int, int, float, float, bool]:
    """Columns, targets per row, first column, scale, cap, and whether there is a cap."""
    scale, cap = vocabulary.rescaling.scale, vocabulary.rescaling.cap
    return part.stop - part.start, vocabulary.targets.shape[1], part.start, scale, cap or 1.0, cap is not None
