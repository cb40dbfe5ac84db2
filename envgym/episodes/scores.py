"""Scores and rewards of episodes: scores derived from rewards in [0, 1], rewards of failures, verdicts on a group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from envgym.errors import InvalidStep
from envgym.types import Episode, Reward

ROUNDING = 1e-6
"""Tolerance around [0, 1] for rewards that were summed or stored in 32 bits."""


def reward_as_score(reward: float | None) -> float | None:
    """The reward as a score, clipped to [0, 1]; None if it lies outside."""
    if reward is None or not -ROUNDING <= reward <= 1 + ROUNDING:
        return None
    return min(1.0, max(0.0, reward))


def reward_failure(episode: Episode, rewards: float | Mapping[str, float] | None) -> None:
    """Give a failed episode the reward of its kind of failure (`rollout.failed_reward`), at its last turn and in place
    of earlier ones, and the score that is nearest to it. An episode that failed before the policy's first turn gets
    none: nothing was sampled to reward."""
    if isinstance(rewards, Mapping):
        reward = rewards.get(episode.outcome.reason)
    else:
        reward = None if episode.outcome.reason == "engine" else rewards
    turns = [turn for row in episode.rows for turn in row.turns]
    if not episode.failed or reward is None or not turns:
        return
    for turn in turns:
        turn.reward = None
    turns[-1].reward = episode.reward = reward
    episode.score, episode.score_is_reward = min(1.0, max(0.0, reward)), True


def is_flat(members: Sequence[Episode]) -> bool:
    """True if finished episodes all have the same score; rewards are compared if an episode has no score."""
    field = "reward" if any(episode.score is None for episode in members) else "score"
    return len({getattr(episode, field) for episode in members}) < 2


def as_reward(verdict: object) -> Reward | Exception:
    """The reward that `score_group` gives one episode. Raises `InvalidStep` for numbers that are not finite."""
    if isinstance(verdict, Exception):
        return verdict
    reward = verdict if isinstance(verdict, Reward) else Reward(verdict)  # type: ignore[arg-type]
    numbers = [reward.reward, reward.score, *reward.metrics.values()]
    try:
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise InvalidStep(f"score_group must give finite numbers, not {verdict!r:.80}")
    except TypeError:
        raise InvalidStep(f"score_group must give numbers, not {verdict!r:.80}") from None
    if reward.score is not None and not 0 <= reward.score <= 1:
        raise InvalidStep(f"score_group gave a score of {reward.score:g}, which is not in [0, 1]")
    return reward


def apply_reward(episode: Episode, verdict: Reward) -> None:
    """Replace the rewards of all env steps of `episode` by the verdict on its group."""
    env_score = None if episode.score_is_reward or episode.reward is not None else episode.score
    reward = None if verdict.reward is None else float(verdict.reward)
    for row in episode.rows:
        for turn in row.turns:
            turn.reward = None
    if last := [turn for row in episode.rows for turn in row.turns][-1:]:
        last[0].reward = reward
    episode.reward = reward
    episode.metrics |= {name: float(value) for name, value in verdict.metrics.items()}
    score = verdict.score if verdict.score is not None else env_score
    episode.score = reward_as_score(reward) if score is None else score
    episode.score_is_reward = score is None and episode.score is not None
