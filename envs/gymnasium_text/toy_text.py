"""Gymnasium's toy texts: FrozenLake and Taxi in words, a map for every task, and the best actions by a search."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from envgym.env import GeneratedTasks, SeededTasks, TaskSet
from envgym.hashing import hash_fraction
from envgym.types import Task

from .views import GenericView, View, WordView

if TYPE_CHECKING:
    import gymnasium

TEST_SHARE = 1 / 8
"""Share of all maps that are held out."""
STANDS = ("R", "G", "Y", "B")


def view_of(env: gymnasium.Env[Any, Any]) -> View:
    """The view for an environment."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
    from gymnasium.envs.toy_text.taxi import TaxiEnv

    if isinstance(env.unwrapped, FrozenLakeEnv):
        return FrozenLakeView(env)
    if isinstance(env.unwrapped, TaxiEnv):
        return TaxiView(env)
    return GenericView(env)


def frozen_lake_maps(split: str, size: int) -> TaskSet:
    """Tasks with one map each, drawn by their seed. No map is in both splits."""
    start = SeededTasks.TEST_START if split == "test" else 0
    return GeneratedTasks(lambda index: _map_task(start + index, size, is_test=split == "test"))


def _map_task(seed: int, size: int, *, is_test: bool) -> Task:
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    for draw in range(10_000):
        lines = generate_random_map(size, seed=seed + draw * 2**32)
        if (hash_fraction("\n".join(lines)) < TEST_SHARE) == is_test:
            return Task(id=f"map-{seed}", seed=seed, fields={"map": lines})
    raise AssertionError(f"no map of {size} squares a side belongs to this split")


class FrozenLakeView(WordView):
    """The map with the player in it."""

    words = ("left", "down", "right", "up")

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rules = (
            "You are on a frozen lake and must walk to the goal without falling into a hole.\n"
            "The map: P is you, S the start, F frozen and safe, H a hole, which ends the game, G the goal.\n"
            "Each turn you take one step left, down, right or up; at the edge of the map you stay where you are."
        )
        if _has_slips(self.world):
            self.rules += "\nThe ice is slippery: a step may also go to either side of the direction you chose."

    def state(self, observation: Any, reward: float | None) -> str:
        row, column = divmod(int(observation), self.world.ncol)
        lines = [[cell.decode() for cell in line] for line in self.world.desc]
        cell = lines[row][column]
        lines[row][column] = "P"
        ending = {"G": "\nYou have reached the goal.", "H": "\nYou have fallen into a hole."}.get(cell, "")
        return "\n".join("".join(line) for line in lines) + ending

    def success(self, reward: float, terminated: bool) -> float | None:
        row, column = divmod(int(self.world.s), self.world.ncol)
        return float(self.world.desc[row][column] == b"G")


class TaxiView(WordView):
    """The map with the taxi in it, and where the passenger is and wants to go."""

    words = ("south", "north", "east", "west", "pickup", "dropoff")
    invalid_reward = -10.0  # what an illegal pickup or dropoff costs

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.rules = (
            "You drive a taxi: go to the passenger, pick them up, go to their destination and drop them off.\n"
            "The map: T is the taxi; R, G, Y and B are the stands, where passengers wait and get off; a square's sides "
            "marked : can be passed, those marked | are walls.\n"
            "Each turn is one step (north is up) or a pickup or dropoff. It costs 1; a pickup or dropoff where it is "
            "not possible costs 10; bringing the passenger to the destination earns 20."
        )
        if _has_slips(self.world):
            self.rules += "\nIt rains: a step may also go to either side of the direction you chose."
        if self.world.fickle_passenger:
            self.rules += "\nThe passenger may choose another destination once the taxi has left with them."

    def state(self, observation: Any, reward: float | None) -> str:
        row, column, passenger, destination = self.world.decode(int(observation))
        lines = [[cell.decode() for cell in line] for line in self.world.desc]
        lines[1 + row][1 + 2 * column] = "T"
        stands = {place: name for name, place in zip(STANDS, self.world.locs, strict=True)}
        stand = f" (stand {stands[row, column]})" if (row, column) in stands else ""
        if passenger == destination:
            end = "The passenger has arrived."
        else:
            status = "is in the taxi" if passenger == len(STANDS) else f"waits at {STANDS[passenger]}"
            end = f"The passenger {status} and wants to go to {STANDS[destination]}."
        drawn = "\n".join("".join(line) for line in lines)
        return f"{drawn}\nThe taxi is in row {row}, column {column}{stand}, counted from 0. {end}"

    def success(self, reward: float, terminated: bool) -> float | None:
        return float(terminated)


def shortest_actions(world: Any, rng: random.Random) -> list[int] | None:
    """The fewest actions from the state of `world` (unwrapped) to the end with the highest reward (breadth first).

    `rng` chooses among paths of the same length. None for a world without its transitions (`P`) and state (`s`) as
    attributes, with random transitions, or without an end.
    """
    if not isinstance(getattr(world, "P", None), dict) or not hasattr(world, "s"):
        return None
    if _has_slips(world) or getattr(world, "fickle_passenger", False):
        return None
    paths: dict[int, list[int]] = {int(world.s): []}
    queue = deque(paths)
    best: tuple[float, list[int]] | None = None
    while queue:
        state = queue.popleft()
        actions = list(world.P[state].items())
        rng.shuffle(actions)
        for action, [(_, next_state, reward, ends)] in actions:
            path = [*paths[state], action]
            if ends and (best is None or reward > best[0]):
                best = reward, path
            elif not ends and next_state not in paths:
                paths[next_state] = path
                queue.append(next_state)
    return best[1] if best is not None else None


def _has_slips(world: Any) -> bool:
    return any(len(outcomes) > 1 for actions in world.P.values() for outcomes in actions.values())
