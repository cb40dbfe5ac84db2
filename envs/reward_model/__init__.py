"""Answers in one turn, rewarded by reward models: one, or several with weights, local or behind HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError
from envgym.services import Assessment, RewardClient, RewardEndpoint, RewardModel, Service, preference
from envgym.types import Action, Message, Task, as_messages

Weight = Annotated[float, Field(allow_inf_nan=False)]


class WeightedModel(RewardModel):
    """A reward model with a weight."""

    weight: Weight = 1.0
    """Factor of its reward in the sum, which is the episode's reward."""
    name: str = ""
    """Name of its metric; by default the last part of `model`."""

    @property
    def title(self) -> str:
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def service(self) -> Service:
        return RewardModel(**self.model_dump(exclude={"weight", "name"}))


class WeightedEndpoint(RewardEndpoint):
    """A reward server with a weight."""

    weight: Weight = 1.0
    """Factor of its reward in the sum, which is the episode's reward."""
    name: str = ""
    """Name of its metric; by default the server's host."""

    @property
    def title(self) -> str:
        return self.name or str(urlsplit(self.urls[0]).hostname)

    @property
    def service(self) -> Service:
        return RewardEndpoint(**self.model_dump(exclude={"weight", "name"}))


def _as_list(key: str) -> Any:
    """A validator that accepts a single entry for a list, and a plain name for settings with only `key`."""

    def expand(value: Any) -> Any:
        entries = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(entries, Sequence):
            return value
        return [{key: entry} if isinstance(entry, str) else entry for entry in entries]

    return BeforeValidator(expand)


class RewardModelEnvConfig(DataEnvConfig):
    models: Annotated[tuple[WeightedModel, ...], _as_list("model")] = ()
    """Reward models: folders or hub ids, or settings of each (`[{model: M, weight: 0.7}, …]`)."""
    endpoints: Annotated[tuple[WeightedEndpoint, ...], _as_list("urls")] = ()
    """Reward servers: addresses, or settings of each (`[{urls: [U, V], weight: 0.3}]`)."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds an answer may wait for its reward, including the queue."""


class RewardModelEnv(Env):
    """Presents the task and rewards the answer by the models."""

    spec: RewardModelEnvSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.messages = prompt_messages(self.task)
        return list(self.messages), {}

    async def step(self, action: Action) -> StepResult:
        conversation = [*self.messages, Message("assistant", action.text)]
        reward, info = await self.spec.assess(conversation, self.task.answer)
        return (), reward, True, False, info


def prompt_messages(task: Task) -> tuple[Message, ...]:
    """The task's conversation without the final answer of recorded data."""
    messages = as_messages(task.prompt)
    return messages[:-1] if len(messages) > 1 and messages[-1].role == "assistant" else messages


class RewardModelEnvSpec(DataEnvSpec):
    """Answers in one turn, rewarded by reward models: one, or several with weights, local or behind HTTP."""

    env_class = RewardModelEnv
    Config = RewardModelEnvConfig
    config: RewardModelEnvConfig
    answer_required = False

    @property
    def weighted(self) -> dict[str, WeightedModel | WeightedEndpoint]:
        """Every model and endpoint under the name of its metric."""
        weighted: dict[str, WeightedModel | WeightedEndpoint] = {}
        declared: list[WeightedModel | WeightedEndpoint] = [*self.config.models, *self.config.endpoints]
        for model in declared:
            name = re.sub(r"[^\w.-]+", "_", model.title) or "reward"
            unique = name if name not in weighted else f"{name}-{len(weighted) + 1}"
            weighted[unique] = model
        return weighted

    @property
    def services(self) -> Mapping[str, Service]:
        return {name: model.service for name, model in self.weighted.items()}

    async def setup(self) -> None:
        if not self.weighted:
            raise ConfigError(
                f"environment {self.id}: which reward model? Give env.models=FOLDER, or env.endpoints=URL of a server"
            )
        await super().setup()

    def demonstrations(self, task: Task, seed: int) -> list[str | Message]:
        """The answer in the data, if any: its own field, or the end of the conversation."""
        if isinstance(task.answer, str):
            return [task.answer]
        last = as_messages(task.prompt)[-1]
        return [last] if last.role == "assistant" else super().demonstrations(task, seed)

    async def assess(self, conversation: Sequence[Message], label: Any) -> tuple[float, Info]:
        """The weighted sum of the models' rewards for a conversation, and the `info` with each of them as a metric."""
        weighted = self.weighted
        clients: list[RewardClient] = [self.clients[name] for name in weighted]
        results: list[Assessment] = await asyncio.gather(*(c.assess(conversation, label=label) for c in clients))
        reward = sum(model.weight * result.reward for model, result in zip(weighted.values(), results, strict=True))
        metrics: dict[str, float] = {}
        for name, result in zip(weighted, results, strict=True):
            metrics[name] = result.reward
            metrics |= {f"{name}/{metric}": value for metric, value in result.metrics.items()}
        # A single server may give a score; of several, the score is that of the sum.
        score = results[0].score if len(results) == 1 else preference(reward)
        if score == reward:  # a repeated reward is no evidence of a score: `Runner.withdraw_scores` decides over all
            score = None
        return reward, {"metrics": metrics} | ({} if score is None else {"score": score})
