"""The exercises that the starter policy was trained on: small tasks in a few words, with demonstrations.

`starter.yaml` beside this file makes the starter of them. No environment of the documentation or the tests is among
them, except the sums of `math_verify`, so that learning one of those shows something.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from envgym.env import Env, EnvSpec, Info, StepResult
from envgym.types import Action, Message, Observation, Task

from .exercise import Exercise
from .families import FAMILIES


def exercise_of(task: Task) -> tuple[str, Exercise]:
    """The exercise of a task, drawn by its seed, and the name of its family."""
    rng = random.Random(task.seed)
    family = rng.choice(FAMILIES)
    return family.__name__, family(rng)


class ExerciseEnv(Env):
    """One exercise, with the replies of its demonstration. The reward is 1 for the demonstrated turns, else 0."""

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.family, self.exercise = exercise_of(self.task)
        self.n_turns, self.is_right = 0, True
        return Observation(self.exercise.prompt, tools=self.exercise.tools), {}

    async def step(self, action: Action) -> StepResult:
        turns, replies = self.exercise.turns, self.exercise.replies
        self.is_right &= _content(action) == _content(turns[self.n_turns])
        self.n_turns += 1
        if self.n_turns < len(turns):
            return replies[self.n_turns - 1], 0.0, False, False, {}
        reward = float(self.is_right)
        info = {} if self.exercise.is_free else {"metrics": {f"accuracy/{self.family}": reward}}
        return None, reward, True, False, info


class Exercises(EnvSpec):
    """The exercises of the starter policy."""

    env_class = ExerciseEnv
    agent = "tool_calling"

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        return list(exercise_of(task)[1].turns)


def _content(turn: str | Message | Action) -> str | list[tuple[str, Any]]:
    """The calls of a turn, names and arguments, or its text if there are none."""
    if isinstance(turn, str):
        return turn
    return [(call.name, call.arguments) for call in turn.tool_calls] or turn.text
