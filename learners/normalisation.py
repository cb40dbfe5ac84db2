"""Advantages brought to mean 0 and standard deviation 1, over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .returns import Steps

Scope = Literal["batch", "group", "none"]
EPS = 1e-8


def normalised(groups: Sequence[Sequence[Steps]], scope: Scope) -> list[list[Steps]]:
    """(A - mean) / (std + 1e-8) over all action tokens of the rollout (`batch`) or of each group by itself.

    `groups` holds for each group the advantages [n] of each episode. The standard deviation is that of the tokens
    themselves (biased); equal advantages become exactly 0. Source: J. Hu et al., "REINFORCE++" (2025).
    """
    if scope == "none":
        return [list(group) for group in groups]
    if scope == "group":
        return [_standardised(group) for group in groups]
    together = iter(_standardised([episode for group in groups for episode in group]))
    return [[next(together) for _ in group] for group in groups]


def _standardised(episodes: Sequence[Steps]) -> list[Steps]:
    import numpy as np

    tokens = np.concatenate([np.zeros(0), *episodes])
    if not len(tokens) or tokens.min() == tokens.max():
        return [np.zeros_like(episode) for episode in episodes]
    mean, std = tokens.mean(), tokens.std()
    return [(episode - mean) / (std + EPS) for episode in episodes]
