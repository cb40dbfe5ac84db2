"""Taxi in words."""

from __future__ import annotations

from typing import Any

from .view import WordView

STANDS = ("R", "G", "Y", "B")


class TaxiView(WordView):
    """The map with the taxi in it, and where the passenger is and wants to go."""

    words = ("south", "north", "east", "west", "pickup", "dropoff")
    invalid_reward = -10.0  # what an illegal pickup or dropoff costs

    @property
    def rules(self) -> str:
        rain = (
            "\nIt rains: a step may also go to either side of the direction you chose."
            if any(len(outcomes) > 1 for state in self.world.P.values() for outcomes in state.values())
            else ""
        )
        fickle = (
            "\nThe passenger may choose another destination once the taxi has left with them."
            if self.world.fickle_passenger
            else ""
        )
        return (
            "You drive a taxi: go to the passenger, pick them up, go to their destination and drop them off.\n"
            "The map: T is the taxi; R, G, Y and B are the stands, where passengers wait and get off; a square's sides "
            "marked : can be passed, those marked | are walls.\n"
            "Each turn is one step (north is up) or a pickup or dropoff. It costs 1; a pickup or dropoff where it is "
            "not possible costs 10; bringing the passenger to the destination earns 20." + rain + fickle
        )

    def state(self, observation: Any, reward: float | None) -> str:
        row, column, passenger, destination = self.world.decode(int(observation))
        lines = [[cell.decode() for cell in line] for line in self.world.desc]
        lines[1 + row][1 + 2 * column] = "T"
        stands = {place: name for name, place in zip(STANDS, self.world.locs, strict=True)}
        at = f" (stand {stands[row, column]})" if (row, column) in stands else ""
        if passenger == destination:
            end = "The passenger has arrived."
        else:
            where = "is in the taxi" if passenger == len(STANDS) else f"waits at {STANDS[passenger]}"
            end = f"The passenger {where} and wants to go to {STANDS[destination]}."
        drawn = "\n".join("".join(line) for line in lines)
        return f"{drawn}\nThe taxi is in row {row}, column {column}{at}, counted from 0. {end}"

    def success(self, reward: float, terminated: bool) -> float | None:
        return float(terminated)
