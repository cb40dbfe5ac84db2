"""Metrics of worker ranks: sums that are added up over micro-batches and ranks, then divided; peak memory and FLOPs of
the device."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from envgym.learner import MetricSums

if TYPE_CHECKING:
    import torch


PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
"""Dense 16-bit matrix FLOPs per second, from the makers' data sheets, by a part of the device's name. More specific
names come first."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOPs per second of the named device; None if unknown, as for float32."""
    if dtype not in ("bfloat16", "float16"):
        return None
    words = f" {device_name.replace('-', ' ').replace('/', ' ')} "  # compared whole: "A10" is not in "NVIDIA A100"
    return next((flops for name, flops in PEAK_FLOPS.items() if f" {name} " in words), None)


def add(total: MetricSums, sums: MetricSums) -> None:
    """Add `sums` to `total` in place; names that end in `/max` or `/min` get the maximum or minimum."""
    for name, (numerator, denominator) in sums.items():
        if name not in total:
            total[name] = (numerator, denominator)
        elif name.endswith("/max"):
            total[name] = (float(np.maximum(total[name][0], numerator)), 1.0)  # keeps a NaN
        elif name.endswith("/min"):
            total[name] = (float(np.minimum(total[name][0], numerator)), 1.0)
        else:
            total[name] = (total[name][0] + numerator, total[name][1] + denominator)


def merge(parts: Iterable[MetricSums]) -> dict[str, float]:
    """Add up and divide. A metric with denominator 0 is undefined and omitted."""
    total: MetricSums = {}
    for part in parts:
        add(total, part)
    return {name: numerator / denominator for name, (numerator, denominator) in total.items() if denominator}


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process, in GiB: allocated by torch on its GPU, or resident without a GPU."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def mismatch(logprobs: torch.Tensor, old_logprobs: torch.Tensor, current: torch.Tensor) -> MetricSums:
    """Mismatch between the trainer's and the sampler's log-probabilities under the same weights.

    logprobs, old_logprobs [B, T] nats (old ones NaN where nothing was sampled), current [B] bool: rows that these
    weights sampled. `k3` is Schulman's estimate of KL(sampler || trainer), r - 1 - log r with r = trainer / sampler.
    Empty if there are no such tokens.
    """
    compared = old_logprobs.isfinite() & current[:, None]
    compared[:, 0] = False
    difference = (logprobs - old_logprobs)[compared].double()
    if not len(difference):
        return {}
    count = float(len(difference))
    return {
        "mismatch/mean_abs": (float(difference.abs().sum()), count),
        "mismatch/max": (float(difference.abs().max()), 1.0),
        "mismatch/k3": (float((difference.exp() - 1 - difference).sum()), count),
    }
