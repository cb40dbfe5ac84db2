"""An environment that poses pictures, answers with pictures, and judges pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envgym.env import Env, EnvSpec, Info, StepResult, TaskList, TaskSet
from envgym.types import Action, Episode, Message, Task


def pixels(value: int) -> np.ndarray:
    """A picture of one shade."""
    return np.full((6, 8, 3), value, np.uint8)


class Gallery(Env):
    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        return list(self.task.prompt), {}

    async def step(self, action: Action) -> StepResult:
        messages = [Message.user("This is", pixels(int(action.text)))]
        return messages, 0.5, False, False, {}


class GallerySpec(EnvSpec):
    env_class = Gallery

    def tasks(self, split: str) -> TaskSet:
        return TaskList([Task(f"t{n}", (Message.user("What shade?", pixels(n)),)) for n in range(3)])

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[float]:
        """The bytes of an episode's pictures."""
        return [sum(len(i.read()) for m in episode.messages for i in m.images) for episode in episodes]
