"""Best play where an environment tells all its transitions (`P`, as Gymnasium's toy texts do), by value iteration."""

from __future__ import annotations

import random
from typing import Any

DISCOUNT = 0.99  # below 1, so that the shortest of several ways is the best
PRECISION = 1e-9
SWEEPS = 10_000

Transitions = dict[int, dict[int, list[tuple[float, int, float, bool]]]]
"""state -> action -> [(probability, next state, reward, whether it ends)]."""


class Plan:
    """The best actions of every state."""

    def __init__(self, transitions: Transitions) -> None:
        values = dict.fromkeys(transitions, 0.0)
        for _ in range(SWEEPS):
            change = 0.0
            for state, actions in transitions.items():
                best = max(_worth(outcomes, values) for outcomes in actions.values())
                change = max(change, abs(best - values[state]))
                values[state] = best
            if change < PRECISION:
                break
        self._best: dict[int, list[int]] = {}
        for state, actions in transitions.items():
            worth = {action: _worth(outcomes, values) for action, outcomes in actions.items()}
            top = max(worth.values())
            self._best[state] = [action for action, value in worth.items() if value > top - 1e-6]

    def choose(self, state: int, rng: random.Random) -> int:
        """One of the best actions."""
        return rng.choice(self._best[state])


def can_plan(world: Any) -> bool:
    """Whether an environment (unwrapped) tells its transitions and its state."""
    return isinstance(getattr(world, "P", None), dict) and hasattr(world, "s")


def _worth(outcomes: list[tuple[float, int, float, bool]], values: dict[int, float]) -> float:
    return sum(
        probability * (reward + (0.0 if ends else DISCOUNT * values[state]))
        for probability, state, reward, ends in outcomes
    )
