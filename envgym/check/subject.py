"""The environment under examination, with the tasks and scripts that the checks play."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.hashing import task_hash
from envgym.rollout.scripted import Script
from envgym.types import Message, Task

from .play import Around, Played
from .report import Verdict
from .scripts import demonstrated, monkey

TASK_SECONDS = 4.0
"""Seconds for reading tasks, where they are many and slow to make; `FEWEST_TASKS` are read all the same."""
FEWEST_TASKS = 24
DEMONSTRATION_SEEDS = 8
"""Seeds among which the variants of a task's demonstration are looked for."""


class Clock:
    """The seconds that one check may spend on more of the same. The fewest that it needs are done all the same."""

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
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    """The answers so far, by check."""
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
        """The split that is played: `train`, unless all there is is held out."""
        return "train" if self.spec.tasks("train").size != 0 else "test"

    def holds(self, *checks: str) -> bool:
        """True if these checks were answered, and not by a failure."""
        return all(self.verdicts.get(check) in (Verdict.OK, Verdict.WARNING) for check in checks)

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

    async def numbered_tasks(self, count: int, seconds: float, fewest: int) -> AsyncIterator[tuple[int, Task]]:
        """Up to `count` tasks and their numbers, which are also seeds: the `fewest` whatever the time, then as many as
        are asked for within `seconds`."""
        clock = Clock(seconds)
        for number, task in enumerate(await self.tasks(count)):
            if clock.is_up and number >= fewest:
                return
            yield number, task

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
        """The scripts that show how the environment behaves: a few monkeys, and a demonstration where there is one."""
        named: dict[str, Script] = {f"monkey {number}": monkey(number) for number in range(2)}
        if variants := self.demonstrations(task):
            named["demonstration"] = demonstrated(variants[0])
        return named

    async def play(self, task: Task, seed: int, script: Script, name: str = "", around: Around = nullcontext) -> Played:
        """Play one episode. `around` is entered for each call."""
        played = Played(self.spec, task, seed, script, name, around)
        await played.play_out()
        return played
