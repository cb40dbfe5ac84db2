"""Asynchronous rollouts: episodes run while the policy is trained, within a strict staleness limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from envgym.processes.cancellation import start_task
from envgym.tasks.task_set import TaskCursor
from envgym.types import Episode, Group, Outcome, Task

from .buffer import MAX_ROUNDS, Buffer, RolloutBatch, can_drop
from .config import RolloutConfig

RollOut = Callable[[Task, str], Awaitable[Group]]
"""Rolls out a task as the group of this id."""


class AsyncRollouts:
    """Keeps tasks in flight, so that a training step rarely waits for its groups.

    A step takes B groups (`rollout.tasks_per_step`); K is the staleness limit (`rollout.max_staleness`). While version
    v samples, at most (v + 1 + K) B groups have been started, so at most B can become too old, and the next step waits
    for those. So no group is discarded for its age, and long episodes are trained on like short ones. A group that is
    dropped is replaced by another task.
    """

    def __init__(self, buffer: Buffer, cursor: TaskCursor, config: RolloutConfig, roll_out: RollOut) -> None:
        self.version = 0
        self._buffer = buffer
        self._cursor = cursor
        self._step_size = config.tasks_per_step
        self._staleness = config.max_staleness
        self._rounds = config.filter.max_rounds if can_drop(config.filter) else MAX_ROUNDS
        self._roll_out = roll_out
        self._consumed = 0
        self._count = 0
        self._budget = 0
        self._interrupted: list[Task] = []
        self._in_flight: dict[str, Task] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._dropped: list[Group] = []
        self._with_failed: dict[str, Group] = {}
        """Buffered groups, their failed members included."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def take(self) -> tuple[RolloutBatch, list[Group]]:
        """Wait for the groups at the staleness limit. Returns the batch that was rolled out for a step (its groups with
        their failed members, and the groups that were dropped since the last call) and the oldest
        `rollout.tasks_per_step` groups: fewer if the rounds of a step were not enough."""
        self._budget = self._step_size * self._rounds
        while True:
            if self._error is not None:
                raise self._error
            await self._fill()
            if self._is_ready():
                break
            self._changed.clear()
            await self._changed.wait()
        self._consumed += self._step_size
        groups = self._buffer.take_oldest(self._step_size)
        with_failed = [self._with_failed.pop(group.id, group) for group in groups]
        batch = RolloutBatch([*with_failed, *self._dropped], len(groups), 1)
        self._dropped = []
        return batch, groups

    async def advance(self, version: int) -> None:
        """Start the groups that become possible once the engines sample from `version`."""
        self.version = version
        await self._fill()

    async def close(self) -> None:
        """Cancel the groups in flight."""
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    @property
    def n_waiting(self) -> int:
        """Number of tasks that are drawn, and that `take` has not returned as groups."""
        return len(self._interrupted) + len(self._in_flight) + len(self._buffer) + len(self._dropped)

    def state(self) -> dict[str, Any]:
        """The tasks in flight, which a resumed run rolls out again: neither its cursor nor its buffer has them."""
        tasks = [*self._interrupted, *self._in_flight.values()]
        return {"count": self._count, "in_play": [_placeholder(task) for task in tasks]}

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._count, self._interrupted = state["count"], [group.task for group in state["in_play"]]
        self.version, self._consumed = version, version * self._step_size

    def _capacity(self) -> int:
        limit = (self.version + 1 + self._staleness) * self._step_size
        return min(self._budget, limit - self._consumed - len(self._buffer) - len(self._in_flight))

    def _is_ready(self) -> bool:
        if any(version_of(group) <= self.version - self._staleness for group in self._in_flight):
            return False
        return len(self._buffer) >= self._step_size or (not self._in_flight and self._capacity() <= 0)

    async def _fill(self) -> None:
        while (capacity := self._capacity()) > 0:
            tasks, self._interrupted = self._interrupted[:capacity], self._interrupted[capacity:]
            for task in tasks or await self._cursor.next(1):
                group = f"step-{self.version + 1:06d}-{self._count:08d}"
                self._count, self._budget = self._count + 1, self._budget - 1
                self._in_flight[group] = task
                start_task(self._run_group(group, task), self._jobs)

    async def _run_group(self, name: str, task: Task) -> None:
        try:
            group = await self._roll_out(task, name)
            self._cursor.observe([group])
            is_kept = self._buffer.add([group])
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
        else:
            if is_kept:
                self._with_failed[name] = group
            else:
                self._dropped.append(group)
            del self._in_flight[name]
        self._changed.set()


def version_of(group: str) -> int:
    """The policy version that a group was started with, read from its id."""
    return int(group.split("-")[1]) - 1


def _placeholder(task: Task) -> Group:
    """A task as a group, the form of tasks in a checkpoint."""
    return Group("", task, [Episode("", task, Outcome.fail("unplayed", "it was in flight"))])
