"""A member's tasks, marked as its own."""

from __future__ import annotations

from dataclasses import replace

from envgym.env import TaskSet
from envgym.errors import ConfigError
from envgym.types import Task


class MemberTasks(TaskSet):
    """The tasks of the member `name`."""

    def __init__(self, name: str, tasks: TaskSet) -> None:
        self.name = name
        self._tasks = tasks

    @property
    def size(self) -> int | None:
        return self._tasks.size

    @property
    def reach(self) -> int:
        return self._tasks.reach

    def seeded(self, seed: int) -> TaskSet:
        return MemberTasks(self.name, self._tasks.seeded(seed))

    async def get(self, index: int) -> Task:
        task = await self._tasks.get(index)
        if task.env:  # one that is served elsewhere, and cannot be told before
            raise ConfigError(f"member {self.name!r} is a mixture itself: name its members here")
        return replace(task, env=self.name)
