"""Playing tasks until a step has its groups."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from envgym.config.schema import RolloutConfig
from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Task

from .buffer import Buffer

MAX_ROUNDS = 4
"""Times a step plays tasks without a filter: once, and again where too many groups fell short of members."""


@dataclass(slots=True)
class Filling:
    """What was played for a step: all groups, of which the buffer kept some, in how many rounds."""

    played: list[Group] = field(default_factory=list)
    kept: int = 0
    rounds: int = 0

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.played for episode in group.episodes]

    def metrics(self) -> dict[str, float]:
        """What a filter did to the groups that were played."""
        return {"filter/kept_share": self.kept / len(self.played), "filter/rounds": self.rounds}


async def fill(
    buffer: Buffer,
    cursor: TaskCursor,
    config: RolloutConfig,
    play: Callable[[Sequence[Task], int], Awaitable[list[Group]]],
) -> Filling:
    """Play tasks until `buffer` holds `config.tasks` groups, the rounds that a step may have are over, or a first round
    in which every episode failed, or has no reward where there must be one.

    `play` is given the tasks of a round and its number. Where a filter drops groups, later rounds ask for as many more
    as this step's own losses make likely, so that a step is not spent on ever smaller rounds; what is then
    accepted beyond the step's need stays in the buffer for the next one.
    """
    filling = Filling()
    max_rounds = config.filter.max_rounds if config.filter.on else MAX_ROUNDS
    while (missing := config.tasks - len(buffer)) > 0 and filling.rounds < max_rounds:
        count = missing
        if config.filter.on and filling.played:
            count = min(config.tasks, math.ceil(missing * len(filling.played) / max(1, filling.kept)))
        groups = await play(await cursor.next(count), filling.rounds)
        cursor.observe(groups)
        filling.kept += buffer.add(groups)
        filling.played += groups
        filling.rounds += 1
        if all(episode.failed or (buffer.needs_reward and episode.reward is None) for episode in filling.episodes):
            break  # what goes wrong every time does not mend itself: the caller says what it was
    return filling


def nothing_kept(filling: Filling, config: RolloutConfig) -> str:
    """Why a step has no group at all, for people."""
    if config.filter.on and any(episode.reward is not None for episode in filling.episodes):
        return (
            f"rollout.filter kept none of the {len(filling.played)} groups of {filling.rounds} rounds: the tasks are "
            "all too hard for the policy, or all solved"
        )
    if all(episode.failed or episode.reward is None for episode in filling.episodes):
        return "no episode has a reward: the environment gave none, and there is nothing to learn from (see rollouts/)"
    return "no group of episodes is complete enough to learn from (see rollouts/)"
