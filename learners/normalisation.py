"""Advantages brought to mean 0 and standard deviation 1, over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .returns import Steps

    Still = list[NDArray[np.bool_]]

Scope = Literal["batch", "group", "none"]
EPS = 1e-8


def normalised(groups: Sequence[Sequence[Steps]], scope: Scope, still: Sequence[Still] = ()) -> list[list[Steps]]:
    """(A - mean) / (std + 1e-8) over all action tokens of the rollout (`batch`) or of each group by itself.

    `groups` holds for each group the advantages [n] of each episode. The standard deviation is that of the tokens
    themselves (biased); equal advantages become exactly 0. So do tokens that are `still`, [n] bool for each episode:
    they count in mean and deviation, but the mean, which long episodes pull their way, must not move what nothing is
    known of. Source: J. Hu et al., "REINFORCE++" (2025).
    """
    import numpy as np

    if scope == "none":
        return [list(group) for group in groups]
    if scope == "group":
        found = [_standardised(group) for group in groups]
    else:
        together = iter(_standardised([episode for group in groups for episode in group]))
        found = [[next(together) for _ in group] for group in groups]
    if not still:
        return found
    return [
        [np.where(mask, 0.0, episode) for episode, mask in zip(group, masks, strict=True)]
        for group, masks in zip(found, still, strict=True)
    ]


def without_variance(group: Sequence[Steps], ends: Sequence[Sequence[int]]) -> Still:
    """[n] bool for each episode of a group: the tokens of turns for which no member has an advantage over the others.

    `ends[i]` says for each turn of member i, or for the episode as one, how many tokens there are up to its last.
    """
    import numpy as np

    masks = [np.zeros(len(episode), bool) for episode in group]
    for turn in range(max(map(len, ends), default=0)):
        reached = [
            (member, slice(own[turn - 1] if turn else 0, own[turn]))
            for member, own in enumerate(ends)
            if turn < len(own)
        ]
        if not any(group[member][tokens].any() for member, tokens in reached):
            for member, tokens in reached:
                masks[member][tokens] = True
    return masks


def _standardised(episodes: Sequence[Steps]) -> list[Steps]:
    import numpy as np

    tokens = np.concatenate([np.zeros(0), *episodes])
    if not len(tokens) or tokens.min() == tokens.max():
        return [np.zeros_like(episode) for episode in episodes]
    mean, std = tokens.mean(), tokens.std()
    return [(episode - mean) / (std + EPS) for episode in episodes]
