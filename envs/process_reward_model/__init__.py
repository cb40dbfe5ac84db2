"""Answers in steps, each paid as it is written by a process reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from envgym.env import Env, Info, StepResult
from envgym.errors import ConfigError
from envgym.services import RewardModel, Service
from envgym.tasks import DataEnvConfig, DataEnvSpec
from envgym.types import Action, Observation, StopReason, Task, as_messages


def _named(model: Any) -> Any:
    return {"model": model} if isinstance(model, str) else model


class ProcessRewardModelConfig(DataEnvConfig):
    model: Annotated[RewardModel | None, BeforeValidator(_named)] = None
    """The process reward model: a folder, that of the run that trained it, or settings (`model.model`, …)."""
    separator: str = Field("\n\n", min_length=1)
    """Text that ends a step, as `env.separator` was when the model was trained."""
    max_steps: int = Field(64, ge=1)
    """Steps after which the episode is truncated."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds a step may wait for its reward, the queue included."""


class ProcessRewardModelEnv(Env):
    """A turn is a step of one answer: the policy goes on where it stopped, and is paid the probability that the model
    gives the step of being right. The score is that of the least likely step."""

    spec: ProcessRewardModelEnvSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        task: Task = (options or {})["task"]
        self.prompt, self.steps, self.least = as_messages(task.prompt), list[str](), 1.0
        return Observation(messages=tuple(self.prompt), sampling=self.sampling), {}

    @property
    def sampling(self) -> dict[str, Any]:
        return {"stop": self.spec.config.separator}

    async def step(self, action: Action) -> StepResult:
        goes_on = action.stop_reason is StopReason.STOP and self.spec.config.separator in action.text
        if not action.text and self.steps:  # it ended its turn behind the last step
            return (), 0.0, True, False, {"score": self.least}
        separator = self.spec.config.separator
        self.steps.append(f"{action.text.removesuffix(separator)}{separator}")  # as every recorded step ends
        reward = await self.spec.clients["model"].assess_step(self.prompt, self.steps, is_last=not goes_on)
        self.least = min(self.least, reward)
        truncated = goes_on and len(self.steps) == self.spec.config.max_steps
        info = {} if goes_on and not truncated else {"score": self.least}
        return Observation(text="", sampling=self.sampling), reward, not goes_on, truncated, info


class ProcessRewardModelEnvSpec(DataEnvSpec):
    """Answers in steps, each paid as it is written by a process reward model."""

    env_class = ProcessRewardModelEnv
    Config = ProcessRewardModelConfig
    config: ProcessRewardModelConfig
    agent = "multi_turn"
    answer_required = False

    @property
    def services(self) -> Mapping[str, Service]:
        return {} if self.config.model is None else {"model": self.config.model}

    async def setup(self) -> None:
        if self.config.model is None:
            raise ConfigError(f"environment {self.id}: which process reward model? Give env.model=FOLDER")
        await super().setup()
