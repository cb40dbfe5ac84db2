"""An instance of a mixture: one of the member that poses the task."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envgym.env import CheckedEnv, Info
from envgym.errors import InvalidStep, ResetNeeded
from envgym.types import Action, Observation, Task

if TYPE_CHECKING:
    from . import Mixture


class MixtureEnv(CheckedEnv):
    """Plays each episode on an instance of a member, which makes the checks.

    Runs and evaluations ask the spec for the member at once (`Mixture.of`); this serves those who know one
    environment only: a server, the terminal, `envgym.make`.
    """

    spec: Mixture

    def __init__(self, spec: Mixture) -> None:
        self.spec = spec
        self.env = self
        self.rng = random.Random()
        self.task: Task | None = None
        self._member: CheckedEnv | None = None

    async def acquire(self) -> None:
        """Which member's limit counts is known when a task is."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        await self.spec.ensure_setup()
        if seed is not None:
            self.rng.seed(seed)
        task = (options or {}).get("task")
        if task is None:
            task = await self._draw_task(self.rng.getrandbits(31))
        elif not isinstance(task, Task):
            raise InvalidStep(f"options['task'] must be a Task, not {type(task).__name__}")
        self.task = task
        spec = self.spec.of(task)
        if self._member is None or self._member.spec is not spec:
            await self.close()
            self._member = spec.make()
        return await self._member.reset(seed=seed, options={**(options or {}), "task": task})

    async def step(self, action: Action) -> tuple[Observation, float | None, bool, bool, Info]:
        if self._member is None:
            raise ResetNeeded(f"{self.spec.id}: call reset before step")
        return await self._member.step(action)

    async def close(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            await member.close()
