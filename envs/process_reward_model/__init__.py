"""Answers in steps, each rewarded as it is written, by a process reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError
from envgym.services import RewardModel, Service
from envgym.types import Action, Observation, StopReason, as_messages


def _as_settings(model: Any) -> Any:
    return {"model": model} if isinstance(model, str) else model


class ProcessRewardModelConfig(DataEnvConfig):
    model: Annotated[RewardModel | None, BeforeValidator(_as_settings)] = None
    """The process reward model: a folder, the run that trained it, or settings (`model.model`, …)."""
    separator: str = Field("\n\n", min_length=1)
    """Text that ends a step: the `env.separator` that the model was trained with."""
    max_steps: int = Field(64, ge=1)
    """Steps after which the episode is truncated."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds a step may wait for its reward, including the queue."""


class ProcessRewardModelEnv(Env):
    """Each turn is a step of one answer, which the next turn continues. Its reward is the model's probability that
    the step is right; the score is the lowest reward."""

    spec: ProcessRewardModelEnvSpec
    config: ProcessRewardModelConfig

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.prompt, self.steps, self.lowest_reward = as_messages(self.task.prompt), list[str](), 1.0
        self.sampling = {"stop": self.config.separator}
        return Observation(messages=tuple(self.prompt), sampling=self.sampling), {}

    async def step(self, action: Action) -> StepResult:
        continues = action.stop_reason is StopReason.STOP and self.config.separator in action.text
        if not action.text and self.steps:  # the policy ended its turn after the last step
            return (), 0.0, True, False, {"score": self.lowest_reward}
        separator = self.config.separator
        self.steps.append(f"{action.text.removesuffix(separator)}{separator}")  # as every recorded step ends
        reward = await self.spec.clients["model"].assess_step(self.prompt, self.steps, is_last=not continues)
        self.lowest_reward = min(self.lowest_reward, reward)
        truncated = continues and len(self.steps) == self.config.max_steps
        info = {} if continues and not truncated else {"score": self.lowest_reward}
        return Observation(text="", sampling=self.sampling), reward, not continues, truncated, info


class ProcessRewardModelEnvSpec(DataEnvSpec):
    """Answers in steps, each rewarded as it is written, by a process reward model."""

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
