"""Rows with what scoring roles say of them, for tests that have no models. The conftest makes it importable."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from envgym.types import Group, Row, number_rows


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
