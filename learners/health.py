"""The numbers that show whether policy-gradient learning is healthy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envgym.learner import LearnRow, Metrics

if TYPE_CHECKING:
    import torch


def token_metrics(means: Mapping[str, torch.Tensor], log_ratio: torch.Tensor, kept: torch.Tensor) -> Metrics:
    """Means over the tokens that are learned from, and what the ratio to the old policy is like there.

    Every tensor is [B, T], and finite where `kept` (bool) is set. `policy/approx_kl` is the estimate
    r - 1 - log r of KL(old || new), from samples of the old policy (J. Schulman, 2020).
    """
    import torch

    log_ratio = log_ratio.detach().clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    means = {**means, "policy/approx_kl": ratio - 1 - log_ratio}
    infinity = torch.full_like(ratio, float("inf"))
    # One transfer for all of them: each number by itself would wait for the accelerator.
    count, largest, smallest, *sums = torch.stack(
        [
            kept.sum().float(),
            torch.where(kept, ratio, -infinity).max(),
            torch.where(kept, ratio, infinity).min(),
            *(torch.where(kept, values.detach().float(), 0.0).sum() for values in means.values()),
        ]
    ).tolist()
    if not count:
        return {}
    metrics = {name: (total, count) for name, total in zip(means, sums, strict=True)}
    clipped = metrics["policy/clip_fraction_low"][0] + metrics["policy/clip_fraction_high"][0]
    return metrics | {
        "policy/clip_fraction": (clipped, count),
        "policy/ratio/max": (largest, 1.0),
        "policy/ratio/min": (smallest, 1.0),
    }


def advantage_metrics(rows: Sequence[LearnRow]) -> dict[str, float]:
    """`advantage/mean`, `std` and `max_abs` over the tokens that count, and `advantage/group_spread`: the standard
    deviation (biased) of the episodes' mean advantages within their group, averaged over groups."""
    import numpy as np

    by_group: dict[int, dict[int, list[np.ndarray]]] = {}
    for row in rows:
        tokens = row.arrays["advantages"][row.weights > 0]
        if len(tokens):
            by_group.setdefault(row.group, {}).setdefault(row.episode, []).append(tokens)
    if not by_group:
        return {}
    episodes = {group: [np.concatenate(parts) for parts in own.values()] for group, own in by_group.items()}
    tokens = np.concatenate([tokens for own in episodes.values() for tokens in own]).astype(np.float64)
    return {
        "advantage/mean": float(tokens.mean()),
        "advantage/std": float(tokens.std()),
        "advantage/max_abs": float(np.abs(tokens).max()),
        "advantage/group_spread": float(np.mean([np.std([own.mean() for own in of]) for of in episodes.values()])),
    }


def explained_variance(rows: Sequence[LearnRow]) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens that count, with returns R and the critic's values V before the update:
    1 for a perfect critic, 0 for a constant one. None where the returns do not vary."""
    import numpy as np

    returns, values = (
        np.concatenate([np.zeros(0), *(row.arrays[name][row.weights > 0] for row in rows if name in row.arrays)])
        for name in ("returns", "values")
    )
    if not len(returns) or returns.min() == returns.max():
        return None
    return float(1 - (returns - values).var() / returns.var())
