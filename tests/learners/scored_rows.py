"""Rows with what scoring roles say of them, for tests that have no models. The conftest makes it importable."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from envgym.types import Episode, Group, Outcome, Row, Segment, Task, Turn, number_rows


class ScoredRow(Row):
    """A row, and in `outputs` one number a token of each scoring role."""

    def __init__(self, *args: Any, outputs: dict[str, list[float]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = outputs or {}


def scored(groups: list[Group]) -> Sequence[Group]:
    """Copies of groups, whose rows' arrays hold what the rows' `outputs` say."""
    made = number_rows(deepcopy(groups))
    for row in (row for group in made for episode in group.episodes for row in episode.rows):
        row.arrays |= {role: np.array(numbers, np.float32) for role, numbers in row.outputs.items()}
    return made


def group_of_turns(*members: list[float]) -> Group:
    """A group whose members are lists of what each turn was paid; a turn has two tokens."""
    episodes = []
    for paid in members:
        segments = [Segment("prompt", [1])]
        for _ in paid:
            segments += [Segment("action", [2, 3], logprobs=[-1.0, -1.0]), Segment("feedback", [4])]
        row = Row(segments[:-1], turns=[Turn(reward, "stop") for reward in paid])
        episodes.append(Episode("e", Task("t"), Outcome.finish(), rows=[row], reward=sum(paid)))
    return Group("g", Task("t"), episodes)
