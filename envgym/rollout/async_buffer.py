"""A supply of groups that goes on while the policy learns, with a strict bound on how old they may be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from envgym.tasks.cursor import TaskCursor
from envgym.types import Episode, Group, Outcome, Task

from .buffer import MAX_ROUNDS, Buffer, RolloutBatch
from .config import RolloutConfig

Play = Callable[[Task, str], Awaitable[Group]]
"""Plays a task as one group; is given the group's name."""


class AsyncRollouts:
    """Keeps tasks in play so that a step finds its groups ready, or nearly so.

    A step takes B groups, `rollout.tasks`. Those begun by the time version v is sampled from number (v + 1 + K) B at
    most, so the ones that the step after the next would find more than K versions old (`rollout.max_staleness`) number
    at most B, and go into the next step: it waits for them. So nothing is thrown away for its age, and long episodes
    are learned from like short ones. A group that is dropped gives its place to another task.
    """

    def __init__(self, buffer: Buffer, cursor: TaskCursor, config: RolloutConfig, play: Play) -> None:
        self.version = 0
        self._buffer = buffer
        self._cursor = cursor
        self._needed = config.tasks
        self._staleness = config.max_staleness
        self._rounds = config.filter.max_rounds if config.filter.on else MAX_ROUNDS
        self._play = play
        self._taken = 0
        self._count = 0
        self._budget = 0
        self._again: list[Task] = []
        self._flying: dict[str, Task] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped: list[Group] = []
        self._whole: dict[str, Group] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def take(self) -> tuple[RolloutBatch, list[Group]]:
        """The oldest groups for the next step, once all that may not wait longer have ended, and what was played for
        them: these as they ended, and those that were dropped since the last time. There are fewer than asked for where
        as many rounds as a step may have were not enough."""
        self._budget = self._needed * self._rounds
        while True:
            if self._error is not None:
                raise self._error
            await self._fill()
            if self._is_ready():
                break
            self._changed.clear()
            await self._changed.wait()
        self._taken += self._needed
        groups = self._buffer.take_oldest(self._needed)
        played = [self._whole.pop(group.id, group) for group in groups]
        batch = RolloutBatch([*played, *self._dropped], len(groups), 1)
        self._dropped = []
        return batch, groups

    async def moved_on(self, version: int) -> None:
        """The engines sample from the weights of `version` now: there is room for more."""
        self.version = version
        await self._fill()

    async def close(self) -> None:
        """Leave what is in play."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """The tasks in play, which a resumed run needs beside cursor and buffer and plays again."""
        in_play = [*self._again, *self._flying.values()]
        return {"count": self._count, "in_play": [_unplayed(task) for task in in_play]}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._count, self._again = state["count"], [group.task for group in state["in_play"]]
        self.version, self._taken = version, version * self._needed

    def _room(self) -> int:
        most = (self.version + 1 + self._staleness) * self._needed
        return min(self._budget, most - self._taken - len(self._buffer) - len(self._flying))

    def _is_ready(self) -> bool:
        if any(version_of(group) <= self.version - self._staleness for group in self._flying):
            return False
        return len(self._buffer) >= self._needed or (not self._flying and self._room() <= 0)

    async def _fill(self) -> None:
        while (room := self._room()) > 0:
            tasks, self._again = self._again[:room], self._again[room:]
            for task in tasks or await self._cursor.next(1):
                group = f"step-{self.version + 1:06d}-{self._count:08d}"
                self._count, self._budget = self._count + 1, self._budget - 1
                self._flying[group] = task
                flight = asyncio.create_task(self._fly(group, task))
                self._tasks.add(flight)
                flight.add_done_callback(self._tasks.discard)

    async def _fly(self, name: str, task: Task) -> None:
        try:
            group = await self._play(task, name)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
        else:
            self._cursor.observe([group])
            if self._buffer.add([group]):
                self._whole[name] = group
            else:
                self._dropped.append(group)
            del self._flying[name]
        self._changed.set()


def version_of(group: str) -> int:
    """The policy version that a group was begun with, by its name."""
    return int(group.split("-")[1]) - 1


def _unplayed(task: Task) -> Group:
    """A task in the form that checkpoints keep tasks in."""
    return Group("", task, [Episode("", task, Outcome.fail("unplayed", "it was in play"))])
