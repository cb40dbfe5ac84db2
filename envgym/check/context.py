"""What the checks of one environment share: the environment, tasks to play, and how long they may take."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.hashing import task_hash
from envgym.types import Message, Task

from .play import Played, Script
from .scripts import monkey, shown

TASK_SECONDS = 4.0
"""Seconds for reading tasks, where they are many and slow to make; a few are read all the same."""
FEWEST_TASKS = 24
DEMONSTRATION_SEEDS = 8
"""Seeds among which the variants of a task's demonstration are looked for."""


class Clock:
    """The seconds that one check may spend on more of the same. What must be done is done all the same."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_up(self) -> bool:
        return time.monotonic() > self._end


@dataclass(slots=True)
class Subject:
    """The environment under examination, set up, in the process that examines it."""

    spec: EnvSpec
    name: str
    settings: dict[str, object]
    is_remote: bool = False
    episodes: list[Played] = field(default_factory=list)
    """Every episode that was played so far to see what it is like."""
    working_directory: str = field(default_factory=os.getcwd)
    demonstration_error: str = ""
    _demonstrations: dict[str, list[list[str | Message]]] = field(default_factory=dict)

    @property
    def needs_services(self) -> list[str]:
        """The names of the services it declares."""
        return sorted({name for part in (self.spec, *self.spec.parts()) for name in part.services})

    @property
    def split(self) -> str:
        """Whose tasks are played: `train`, unless all there is is held out."""
        return "train" if self.spec.tasks("train").size != 0 else "test"

    async def tasks(self, count: int, split: str | None = None) -> list[Task]:
        """Up to `count` different tasks: the first, and others from all over the split. The same at every call, but
        for their number where they are slow."""
        split = split or self.split
        tasks = self.spec.tasks(split)
        rng = random.Random(f"tasks {split}")
        indices: Sequence[int] = range(tasks.reach)
        if len(indices) > count:
            indices = [0, *rng.sample(indices[1:], count - 1)]
        found = []
        clock = Clock(TASK_SECONDS)
        for index in indices:
            found.append(await tasks.get(index))
            await asyncio.sleep(0)  # a set that never waits would keep the loop to itself
            if clock.is_up and len(found) >= FEWEST_TASKS:
                break
        return found

    def demonstrations(self, task: Task) -> list[list[str | Message]]:
        """The variants there are; none where the environment has none."""
        key = task_hash(task)  # ids may not be unique: that is one of the questions
        if key not in self._demonstrations:
            variants: dict[str, list[str | Message]] = {}
            try:
                for seed in range(DEMONSTRATION_SEEDS):
                    turns = list(self.spec.of(task).demonstrations(task, seed))
                    variants[repr(turns)] = turns
            except ConfigError:  # it has none
                variants = {}
            except Exception as error:
                self.demonstration_error = self.demonstration_error or f"{type(error).__name__}: {error}"
            self._demonstrations[key] = list(variants.values())
        return self._demonstrations[key]

    def scripts(self, task: Task) -> dict[str, Script]:
        """What is played to see how the environment behaves: a few monkeys, and a demonstration where there is one."""
        named: dict[str, Script] = {f"monkey {number}": monkey(number) for number in range(2)}
        if variants := self.demonstrations(task):
            named["demonstration"] = shown(variants[0])
        return named
