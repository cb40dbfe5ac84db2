"""vLLM's LoRA on a CPU for batches in which every token has the same adapter, as envgym's always do.

vLLM's own code gathers a copy of the adapter's matrices for every token: a small model sampled at 0.36 of its speed
without an adapter. Two matrix products for the whole batch reach 0.8.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM is untyped here
    """Adds an adapter to the output of linear layers; leaves batches of several adapters to vLLM."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """y [tokens, out] += scale * x A^T B^T, slice by slice of the output: of the layers that vLLM has fused
        (query, key and value) each has its own A [adapters, 1, rank, in] and B [adapters, 1, out, rank]."""
        if self.no_lora:
            return
        if self.batch_size != 1:  # runs of tokens with one adapter
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        slot = int(self._lora_indices_per_batch[0])
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + size] += (x @ a[slot, 0].T) @ b[slot, 0].T * scale
            start += size
