"""An environment that says what it is told, and takes its time to judge and to close."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from envgym.env import Env, EnvConfig, EnvSpec, Info, StepResult
from envgym.types import Action, Episode, Task


class Patient(Env):
    spec: PatientSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.steps = 0
        return "say", {}

    async def step(self, action: Action) -> StepResult:
        self.steps += 1
        return action.text, 1.0, False, False, {"steps": self.steps}

    async def close(self) -> None:
        await asyncio.sleep(self.spec.config.close_seconds)


class PatientSpec(EnvSpec):
    env_class = Patient

    class Config(EnvConfig):
        close_seconds: float = 0.0
        judge_seconds: float = 0.0

    config: Config

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[float]:
        print("judging", flush=True)
        await asyncio.sleep(self.config.judge_seconds)
        return [0.5] * len(episodes)
