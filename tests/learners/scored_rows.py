"""Rows with what scoring roles say of them, for tests that have no models. The conftest makes it importable."""

from typing import Any

import numpy as np

from envgym.learner import Trajectory, trajectories
from envgym.types import Group, Row


class ScoredRow(Row):
    """A row, and in `outputs` one number a token of each scoring role."""

    def __init__(self, *args: Any, outputs: dict[str, list[float]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outputs = outputs or {}


def scored(groups: list[Group]) -> list[list[Trajectory]]:
    """Trajectories whose samples hold what the rows' `outputs` say."""
    made = trajectories(groups)
    for trajectory in (trajectory for group in made for trajectory in group):
        for row, sample in zip(trajectory.episode.rows, trajectory.samples, strict=True):
            sample.arrays |= {role: np.array(numbers, np.float32) for role, numbers in row.outputs.items()}
    return made
