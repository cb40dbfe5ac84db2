"""FrozenLake in words."""

from __future__ import annotations

from typing import Any

from .view import WordView


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
