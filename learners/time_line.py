"""An episode's action tokens as one time line, however many rows it has and whatever lies between its turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from envgym.learner import LearnRow
from envgym.types import Episode, Row, Status

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .returns import Steps


@dataclass(slots=True)
class TimeLine:
    """Time steps are the tokens that count (weight above 0), of all rows in order.

    rows       the episode's rows, whose arrays are read and written
    places     for each row, the indexes [n of the row] of its time steps
    ends       for each turn, how many steps there are up to and with its last; a turn may have none
    rewards    for each turn, what it was paid
    reward     the episode's: the sum of its turns'
    truncated  whether a limit ended it, and not the environment's word
    """

    rows: list[LearnRow]
    places: list[NDArray[np.int64]]
    ends: list[int]
    rewards: list[float]
    reward: float
    truncated: bool

    @classmethod
    def of(cls, episode: Episode, rows: list[LearnRow], reward: float) -> TimeLine:
        """The time line of an episode that was made into `rows`. What `reward` is more or less than what the turns
        were paid (penalties, a clip) is the last turn's."""
        import numpy as np

        places = [np.flatnonzero(row.weights > 0) for row in rows]
        ends, rewards, steps = [], [], 0
        for row, own in zip(episode.rows, places, strict=True):
            for end, paid in turns(row):
                ends.append(steps + int(np.searchsorted(own, end)))
                rewards.append(paid)
            steps += len(own)
        if rewards:
            rewards[-1] = reward - sum(rewards[:-1])
        return cls(rows, places, ends, rewards, reward, episode.outcome.status is Status.TRUNCATED)

    def __len__(self) -> int:
        return sum(len(own) for own in self.places)

    def step_rewards(self, *, by_turn: bool) -> Steps:
        """[n] Rewards on the last token of their own turn, or all on the episode's last. A turn without a step pays on
        the step before it."""
        import numpy as np

        result = np.zeros(len(self))
        if len(self):
            paid = zip(self.ends, self.rewards, strict=True) if by_turn else [(len(self), self.reward)]
            for end, reward in paid:
                result[max(end - 1, 0)] += reward
        return result

    def read(self, name: str, offset: int = 0) -> Steps:
        """[n] What the rows' array `name` (or `old_logprobs`) says `offset` tokens after each time step."""
        import numpy as np

        arrays = [row.old_logprobs if name == "old_logprobs" else row.arrays[name] for row in self.rows]
        parts = [array[own + offset] for array, own in zip(arrays, self.places, strict=True)]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float64)

    def write(self, name: str, values: Steps) -> None:
        """Make the rows' array `name` of one number [n] for each time step; it is 0 elsewhere."""
        import numpy as np

        start = 0
        for row, own in zip(self.rows, self.places, strict=True):
            row.arrays[name] = np.zeros(len(row.token_ids), np.float32)
            row.arrays[name][own] = values[start : start + len(own)]
            start += len(own)


def turns(row: Row) -> list[tuple[int, float]]:
    """(where it ends, what it was paid) for each turn of a row.

    A turn is an action segment. Where a row holds other numbers of the two, nobody knows which belongs to which, and
    it counts as one turn.
    """
    ends, length = [], 0
    for segment in row.segments:
        length += len(segment.token_ids)
        if segment.role == "action":
            ends.append(length)
    paid = [turn.reward or 0.0 for turn in row.turns]
    if len(paid) != len(ends):
        ends, paid = ends[-1:], [sum(paid)] if ends else []
    return list(zip(ends, paid, strict=True))
