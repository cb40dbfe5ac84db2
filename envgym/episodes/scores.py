"""Rewards in place of scores that an environment does not give, where they all lie in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from envgym.types import Episode

ROUNDING = 1e-6
"""Distance from [0, 1] that a reward may have from adding up, or from 32 bits."""


def reward_as_score(reward: float | None) -> float | None:
    """The score that a reward is; None where it lies outside [0, 1]."""
    if reward is None or not -ROUNDING <= reward <= 1 + ROUNDING:
        return None
    return min(1.0, max(0.0, reward))


def withdraw(episodes: Iterable[Episode], unscored: set[str]) -> list[Episode]:
    """Take back the scores that are rewards in environments some of whose rewards are none. Returns the episodes that
    lost theirs.

    A score of the episodes alone whose reward happens to lie in [0, 1] would be one of the winners, say, of a game that
    pays 1 and -1. `unscored` holds the environments of which that is known, and is added to.
    """
    finished = [episode for episode in episodes if not episode.failed]
    unscored |= {
        episode.env
        for episode in finished
        if episode.score is None and episode.reward is not None and reward_as_score(episode.reward) is None
    }
    withdrawn = [episode for episode in finished if episode.score_is_reward and episode.env in unscored]
    for episode in withdrawn:
        episode.score, episode.score_is_reward = None, False
    return withdrawn


def is_flat(members: Sequence[Episode]) -> bool:
    """True if finished episodes all have one score or, where one of them has none, one reward."""
    by = "reward" if any(episode.score is None for episode in members) else "score"
    return len({getattr(episode, by) for episode in members}) < 2
