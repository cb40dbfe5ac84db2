"""Which tokens a reward counts for: all of the episode's, or those up to the turn that earned it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Credit = Literal["episode", "turn"]
Compare = Callable[[Sequence[float], Sequence[float]], Sequence[float]]
"""(values, rewards) -> one advantage for each member: its value against what the group's rewards say."""


def turn_advantages(to_go: Sequence[Sequence[float]], rewards: Sequence[float], compare: Compare) -> list[list[float]]:
    """An advantage for each turn of each member of a group.

    `to_go[i][k]` is what member i earned from turn k on, `rewards[i]` in all. A turn is compared with the same turn
    of the members that reached it; where fewer than two did, with the rewards of the whole episodes.
    """
    result: list[list[float]] = [[] for _ in to_go]
    for turn in range(max(map(len, to_go), default=0)):
        reached = [member for member, own in enumerate(to_go) if len(own) > turn]
        if len(reached) > 1:
            values = [to_go[member][turn] for member in reached]
            advantages = compare(values, values)
        else:
            values = list(rewards)
            values[reached[0]] = to_go[reached[0]][turn]
            advantages = [compare(values, rewards)[reached[0]]]
        for member, advantage in zip(reached, advantages, strict=True):
            result[member].append(advantage)
    return result
