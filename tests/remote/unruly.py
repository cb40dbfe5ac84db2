"""An environment that does what none should, at a word of its client or where its settings say; served by `game.py`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult, TaskList, TaskSet
from envgym.types import Action, Episode, Reward, Task


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Sparse:
    def tolist(self) -> list[Any]:
        raise RuntimeError("too large to write down")


def within_itself() -> dict[str, Any]:
    around: dict[str, Any] = {}
    around["around"] = around
    return around


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels > 1 else []


INFO = {
    "surrogate": "caf\udce9",
    "long number": 10**5000,
    "within itself": within_itself(),
    "sparse": Sparse(),
    "deep": nested(250),
    "far down": {"list": [{1: 2}]},
    "fine": {"a": [1, "é", None], "not so deep": nested(90)},
}


async def misbehave(how: str) -> None:
    match how:
        case "cancel a task of its own":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        case "cancel itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "wait":
            await asyncio.sleep(60)
        case "raise what has no words":
            raise Nameless


class Unruly(Env):
    spec: UnrulySpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        assert options is not None
        self.task: Task = options["task"]
        self.steps = 0
        await self.hold(options.get("reset", ""))
        await misbehave(options.get("reset", ""))
        await asyncio.sleep(self.spec.config.reset_seconds)
        return "ready", {"task": repr((self.task.answer, self.task.fields)), "options": repr(options.get("given"))}

    async def step(self, action: Action) -> StepResult:
        self.steps += 1
        await self.hold(action.text)
        await misbehave(action.text)
        if action.text.startswith("take "):
            print("stepping", flush=True)
            self.spec.long_steps += 1
            await asyncio.sleep(float(action.text.removeprefix("take ")))
        info = INFO if action.text == "info" else {"steps": self.steps}
        return "x" * 10_000, float(self.task.answer == [1, 2]), False, False, info

    async def hold(self, how: str) -> None:
        """Be at work until the test lets go."""
        if how == "hold":
            self.spec.held.set()
            await self.spec.free.wait()

    async def close(self) -> None:
        await misbehave(self.spec.config.close)
        await asyncio.sleep(self.spec.config.close_seconds)
        self.spec.instances -= 1


class Odd(TaskSet):
    """Tasks that cannot be read."""

    def __init__(self, how: str) -> None:
        self._how = how

    @property
    def size(self) -> int | None:
        return 1

    async def get(self, index: int) -> Task:
        await misbehave(self._how)
        raise AssertionError


class UnrulySpec(EnvSpec):
    env_class = Unruly
    instances = 0
    most_instances = 0
    judged = 0
    long_steps = 0
    held: asyncio.Event
    free: asyncio.Event

    class Config(EnvConfig):
        close: str = ""
        page: str = ""
        judge: str = ""
        describe: str = ""
        reset_seconds: float = 0.0
        close_seconds: float = 0.0
        judge_seconds: float = 0.0

    config: Config

    def make(self) -> Any:
        self.instances += 1
        self.most_instances = max(self.most_instances, self.instances)
        return super().make()

    def tasks(self, split: str) -> TaskSet:
        if split == "test" and self.config.describe == "exit":
            sys.exit(3)
        if split == "test" and self.config.describe == "raise what has no words":
            raise Nameless
        if self.config.page:
            return Odd(self.config.page)
        fields = {"map": {"1": "one", "": "two"}, "pair": [1, [2, [3]]], "$ref": "a word"}
        return TaskList([Task(f"t{number}", "?", [1, 2], fields) for number in range(3)])

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Reward | Exception | float]:
        self.judged += 1
        print("judging", flush=True)
        await misbehave(self.config.judge)
        await asyncio.sleep(self.config.judge_seconds)
        return [float(task.answer == episode.task.answer == [1, 2]) for episode in episodes]
