"""FrozenLake in words, and maps for it without end."""

from __future__ import annotations

import hashlib
from typing import Any

from envgym.env import SeedTasks
from envgym.types import Task

from .view import WordView

TEST_SHARE = 1 / 8


class FrozenLakeMaps(SeedTasks):
    """Tasks with a map of their own, drawn by their seed. No map is in both splits."""

    def __init__(self, split: str, size: int) -> None:
        super().__init__(split)
        self._is_test, self._size = split == "test", size

    async def get(self, index: int) -> Task:
        from gymnasium.envs.toy_text.frozen_lake import generate_random_map

        seed = (await super().get(index)).seed
        assert seed is not None
        for draw in range(10_000):
            lines = generate_random_map(self._size, seed=seed + draw * 2**32)
            if is_held_out(lines) == self._is_test:
                return Task(id=f"map-{seed}", seed=seed, fields={"map": lines})
        raise AssertionError(f"no map of {self._size} squares a side belongs to this split")


def is_held_out(lines: list[str]) -> bool:
    """Whether a map belongs to the test split, by a hash that is the same everywhere."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:4], "big") < TEST_SHARE * 2**32


class FrozenLakeView(WordView):
    """The map with the player in it."""

    words = ("left", "down", "right", "up")

    @property
    def rules(self) -> str:
        slips = (
            "\nThe ice is slippery: a step may also go to either side of the direction you chose."
            if any(len(outcomes) > 1 for state in self.world.P.values() for outcomes in state.values())
            else ""
        )
        return (
            "You are on a frozen lake and must walk to the goal without falling into a hole.\n"
            "The map: P is you, S the start, F frozen and safe, H a hole, which ends the game, G the goal.\n"
            "Each turn you take one step left, down, right or up; at the edge of the map you stay where you are."
            + slips
        )

    def state(self, observation: Any, reward: float | None) -> str:
        row, column = divmod(int(observation), self.world.ncol)
        lines = [[cell.decode() for cell in line] for line in self.world.desc]
        under = lines[row][column]
        lines[row][column] = "P"
        ending = {"G": "\nYou have reached the goal.", "H": "\nYou have fallen into a hole."}.get(under, "")
        return "\n".join("".join(line) for line in lines) + ending

    def success(self, reward: float, terminated: bool) -> float | None:
        row, column = divmod(int(self.world.s), self.world.ncol)
        return float(self.world.desc[row][column] == b"G")
