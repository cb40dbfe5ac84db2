"""Answers in one turn, paid by reward models: one or several with weights, here or behind HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from envgym.env import Env, Info, StepResult
from envgym.errors import ConfigError
from envgym.services import Assessment, RewardClient, RewardEndpoint, RewardModel, Service, preference
from envgym.tasks import DataEnvConfig, DataEnvSpec
from envgym.types import Action, Message, Task, as_messages

Weight = Annotated[float, Field(allow_inf_nan=False)]


class WeightedModel(RewardModel):
    """A reward model, and what it counts."""

    weight: Weight = 1.0
    """Its share in the sum that is the reward."""
    name: str = ""
    """Name of its metric; by default the last part of `model`."""

    @property
    def title(self) -> str:
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def service(self) -> Service:
        return RewardModel(**self.model_dump(exclude={"weight", "name"}))


class WeightedEndpoint(RewardEndpoint):
    """A reward server, and what it counts."""

    weight: Weight = 1.0
    """Its share in the sum that is the reward."""
    name: str = ""
    """Name of its metric; by default the server's host."""

    @property
    def title(self) -> str:
        return self.name or str(urlsplit(self.urls[0]).hostname)

    @property
    def service(self) -> Service:
        return RewardEndpoint(**self.model_dump(exclude={"weight", "name"}))


def _several(key: str) -> Any:
    """One where several may stand, and a plain name in place of settings that give `key`."""

    def spread(value: Any) -> Any:
        entries = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(entries, Sequence):
            return value
        return [{key: entry} if isinstance(entry, str) else entry for entry in entries]

    return BeforeValidator(spread)


class RewardModelConfig(DataEnvConfig):
    models: Annotated[tuple[WeightedModel, ...], _several("model")] = ()
    """Reward models: folders or hub ids, or settings of each (`[{model: M, weight: 0.7}, …]`)."""
    endpoints: Annotated[tuple[WeightedEndpoint, ...], _several("urls")] = ()
    """Reward servers: addresses, or settings of each (`[{urls: [U, V], weight: 0.3}]`)."""
    call_timeout: float = Field(300.0, gt=0)
    """Seconds an answer may wait for its reward, the queue included."""


class RewardModelEnv(Env):
    """Poses the task and pays what the models say of the answer."""

    spec: RewardModelEnvSpec

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.task: Task = (options or {})["task"]
        self.messages = asked(self.task)
        return list(self.messages), {}

    async def step(self, action: Action) -> StepResult:
        conversation = [*self.messages, Message.of("assistant", action.text)]
        reward, info = await self.spec.pay(conversation, self.task.answer)
        return (), reward, True, False, info


def asked(task: Task) -> tuple[Message, ...]:
    """The task's conversation without the answer that recorded data have at its end."""
    messages = as_messages(task.prompt)
    return messages[:-1] if len(messages) > 1 and messages[-1].role == "assistant" else messages


class RewardModelEnvSpec(DataEnvSpec):
    """Answers in one turn, paid by reward models: one or several with weights, here or behind HTTP."""

    env_class = RewardModelEnv
    Config = RewardModelConfig
    config: RewardModelConfig
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
        """The answer that the data holds, where it does: by itself, or as the end of the conversation."""
        if isinstance(task.answer, str):
            return [task.answer]
        last = as_messages(task.prompt)[-1]
        return [last] if last.role == "assistant" else super().demonstrations(task, seed)

    async def pay(self, conversation: Sequence[Message], label: Any) -> tuple[float, Info]:
        """The weighted sum of what the models say of a conversation, and what each of them says, as metrics."""
        weighted = self.weighted
        clients: list[RewardClient] = [self.clients[name] for name in weighted]
        found: list[Assessment] = await asyncio.gather(*(c.assess(conversation, label=label) for c in clients))
        reward = sum(model.weight * one.reward for model, one in zip(weighted.values(), found, strict=True))
        metrics: dict[str, float] = {}
        for name, one in zip(weighted, found, strict=True):
            metrics[name] = one.reward
            metrics |= {f"{name}/{metric}": value for metric, value in one.metrics.items()}
        # A server by itself decides whether it scores; several have only their sum in common.
        score = found[0].score if len(found) == 1 else preference(reward)
        if score == reward:  # as servers repeat it: the other rewards tell whether it is one (`envgym.episodes.scores`)
            score = None
        return reward, {"metrics": metrics} | ({} if score is None else {"score": score})
