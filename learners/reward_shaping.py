"""What is done to an episode's raw reward before episodes are compared: penalties for length, and a clip."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from envgym.settings import Settings
from envgym.types import Episode, Status

Bound = Annotated[float, Field(allow_inf_nan=True)]


class ShapingConfig(Settings):
    """Changes of the raw reward, in this order: overlong penalty, stop-properly penalty, clip."""

    clip: tuple[Bound, Bound] | None = None
    """Bounds of the raw reward, before members of a group are compared; `[0, .inf]` has a lower one alone."""
    overlong_length: int | None = Field(None, ge=1)
    """Sampled tokens of an episode at which the penalty for length is whole (DAPO's soft overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1, validate_default=True)
    """Tokens before that, over which the penalty rises linearly from 0."""
    overlong_factor: float = Field(1.0, ge=0)
    """The whole penalty."""
    stop_properly: float | None = Field(None, le=1)
    """What a truncated episode keeps of its reward (ProRL): from 0 to 1 a share of it, below 0 that number instead of
    it. Unset: all of it."""
    overlong_filter: bool = False
    """Do not train on truncated episodes; the others are still compared with them."""

    @field_validator("clip")
    @classmethod
    def _low_first(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] <= clip[1]:  # with NaN as well
            raise ValueError("the lower bound comes first")
        return clip

    @field_validator("overlong_buffer")
    @classmethod
    def _fits_the_length(cls, buffer: int | None, info: ValidationInfo) -> int | None:
        length = info.data.get("overlong_length")
        if (buffer is None) != (length is None):
            raise ValueError("shaping.overlong_length and shaping.overlong_buffer belong together: set both or neither")
        if buffer is not None and length is not None and buffer > length:
            raise ValueError(f"it cannot be longer than shaping.overlong_length ({length})")
        return buffer


def shaped_reward(episode: Episode, config: ShapingConfig) -> float:
    """The reward that the episode counts with. It must have one."""
    assert episode.reward is not None, "an episode without a reward is compared with none"
    reward = episode.reward
    if config.overlong_length is not None and config.overlong_buffer is not None:
        n_tokens = sum(row.n_action_tokens for row in episode.rows)
        reward -= overlong_penalty(n_tokens, config.overlong_length, config.overlong_buffer, config.overlong_factor)
    if config.stop_properly is not None and episode.outcome.status is Status.TRUNCATED:
        reward = stopped_improperly(reward, config.stop_properly)
    if config.clip is not None:
        reward = min(max(reward, config.clip[0]), config.clip[1])
    return reward


def overlong_penalty(n_tokens: int, length: int, buffer: int, factor: float) -> float:
    """0 up to `length - buffer` tokens, from there linearly up to `factor` at `length`, and `factor` beyond it.

    Tokens are sampled ones alone. Source: Q. Yu et al., "DAPO" (2025), eq. 13.
    """
    return min(max(n_tokens - (length - buffer), 0), buffer) / buffer * factor


def stopped_improperly(reward: float, coefficient: float) -> float:
    """The reward of a truncated episode: `coefficient` times it where that is not negative, else `coefficient`.

    Source: the stop-properly penalty of ProRL v2 (J. Hu et al., 2025).
    """
    return coefficient * reward if coefficient >= 0 else coefficient
