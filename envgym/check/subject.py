"""The environment under test, with the tasks and scripts of the checks."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from envgym.env import EnvSpec
from envgym.errors import ConfigError
from envgym.hashing import task_hash
from envgym.rollout.scripted import Script
from envgym.types import Message, Task

from .play import CallContext, CheckedEpisode
from .report import CheckVerdict
from .scripts import demonstration_script, monkey

T = TypeVar("T")

TASK_SECONDS = 4.0
"""Time limit for reading tasks, if they are slow to make; at least `MIN_TASKS` are read."""
MIN_TASKS = 24
DEMONSTRATION_SEEDS = 8
"""Number of seeds that are tried for variants of a task's demonstration."""


def take_in_time(items: Iterable[T], seconds: float, fewest: int) -> Iterator[tuple[int, T]]:
    """The items with their numbers: at least `fewest`, and the others as long as `seconds` have not passed."""
    end = time.monotonic() + seconds
    for number, item in enumerate(items):
        if number >= fewest and time.monotonic() > end:
            return
        yield number, item


@dataclass(slots=True)
class Subject:
    """The environment under test, set up in the process of the checks."""

    spec: EnvSpec
    name: str
    settings: dict[str, object]
    is_remote: bool = False
    verdicts: Mapping[str, CheckVerdict] = field(default_factory=dict)
    """The verdicts so far, by check."""
    episodes: list[CheckedEpisode] = field(default_factory=list)
    """The episodes of `episodes.check`."""
    working_directory: str = field(default_factory=os.getcwd)
    demonstration_error: str = ""
    _demonstrations: dict[str, list[list[str | Message]]] = field(default_factory=dict)

    @property
    def needs_services(self) -> list[str]:
        """The names of the services that it declares."""
        return sorted({name for part in (self.spec, *self.spec.parts()) for name in part.services})

    @property
    def split(self) -> str:
        """The split of the checks: `train`, or `test` if there are no training tasks."""
        return "train" if self.spec.tasks("train").size != 0 else "test"

    def holds(self, *checks: str) -> bool:
        """True if these checks ran and did not fail."""
        return all(self.verdicts.get(check) in (CheckVerdict.OK, CheckVerdict.WARNING) for check in checks)

    async def tasks(self, count: int, split: str | None = None) -> list[Task]:
        """Up to `count` different tasks: the first one and random others of the split. The same ones at every call, but
        fewer if they are slow."""
        split = split or self.split
        tasks = self.spec.tasks(split)
        rng = random.Random(f"tasks {split}")
        indices: Sequence[int] = range(tasks.index_bound)
        if len(indices) > count:
            indices = [0, *rng.sample(indices[1:], count - 1)]
        selection = []
        for _, index in take_in_time(indices, TASK_SECONDS, MIN_TASKS):
            selection.append(await tasks.get(index))
            await asyncio.sleep(0)  # a task set that never awaits would block the event loop
        return selection

    def demonstrations(self, task: Task) -> list[list[str | Message]]:
        """All variants of a task's demonstration; empty if the environment has none, or raises an error (recorded in
        `demonstration_error`)."""
        key = task_hash(task)  # ids may not be unique, which another check reports
        if key not in self._demonstrations:
            variants: dict[str, list[str | Message]] = {}
            try:
                for seed in range(DEMONSTRATION_SEEDS):
                    turns = list(self.spec.spec_for(task).demonstrations(task, seed))
                    variants[repr(turns)] = turns
            except ConfigError:  # the environment has none
                variants = {}
            except Exception as error:
                self.demonstration_error = self.demonstration_error or f"{type(error).__name__}: {error}"
            self._demonstrations[key] = list(variants.values())
        return self._demonstrations[key]

    def scripts(self, task: Task) -> dict[str, Script]:
        """The scripts that exercise the environment: two monkeys, and the demonstration if there is one."""
        scripts: dict[str, Script] = {f"monkey {number}": monkey(number) for number in range(2)}
        if variants := self.demonstrations(task):
            scripts["demonstration"] = demonstration_script(variants[0])
        return scripts

    async def play(
        self, task: Task, seed: int, script: Script, name: str = "", call_context: CallContext = nullcontext
    ) -> CheckedEpisode:
        """Run one episode. `call_context` is entered for each call."""
        episode = CheckedEpisode(self.spec, task, seed, script, name, call_context)
        await episode.play_out()
        return episode
