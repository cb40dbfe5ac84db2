"""The base class of agents that decide token by token what the policy reads. The others here are written on it."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv
from envgym.errors import TurnRefused
from envgym.rollout.transcript import OutOfBudget, Transcript
from envgym.types import Episode, Limit, Outcome, Task


class TokenLevelConfig(AgentConfig):
    """Settings of every agent that samples on a transcript."""

    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample in a whole episode; then it ends, truncated (`tokens`). One turn's limit is
    `rollout.max_tokens`."""


class TokenLevel(Agent):
    """Subclass it and write `play`: put tokens on the transcript, sample from it, and say how the episode ended.

    What is sampled is recorded as it came, and the engine is only ever given what was recorded before.
    """

    Config: ClassVar[type[AgentConfig]] = TokenLevelConfig
    config: TokenLevelConfig

    @abstractmethod
    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        """Play one episode. A budget that runs out (`OutOfBudget`) may pass through: it truncates the episode."""

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        transcript = Transcript(engine, max_tokens=self.config.max_tokens)
        try:
            outcome = await self.play(env, task, transcript, seed=seed)
        except OutOfBudget as limit:
            outcome = Outcome.truncated(limit.reason)
        except TurnRefused:
            outcome = Outcome.truncated(Limit.TEMPLATE)
        return transcript.episode(task, outcome)
