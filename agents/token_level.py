"""The base class of agents that decide token by token what the policy reads, and what other agents share with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, OutOfBudget, Sampler
from envgym.env import CheckedEnv
from envgym.errors import TurnRefused
from envgym.render import Extension
from envgym.rollout.transcript import Transcript
from envgym.types import Episode, Limit, Outcome, Row, Segment, Task


class TokenLevelConfig(AgentConfig):
    """Settings of every agent that samples on a transcript."""

    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample in a whole episode; then it ends, truncated (`tokens`). One turn's limit is
    `rollout.max_tokens`."""


class TokenLevel(Agent):
    """Subclass it and write `play`: put tokens on the transcript, sample from it, and return how the episode ended.

    What is sampled is recorded as it came, and the engine is only ever given what was recorded before.
    """

    Config: ClassVar[type[AgentConfig]] = TokenLevelConfig
    config: TokenLevelConfig

    @abstractmethod
    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        """Play one episode. A budget that runs out (`OutOfBudget`) may pass through: it truncates the episode."""

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        engine.limit(self.config.max_tokens)
        transcript = Transcript(engine)
        try:
            outcome = await self.play(env, task, transcript, seed=seed)
        except OutOfBudget as limit:
            outcome = Outcome.truncated(limit.reason)
        except TurnRefused:
            outcome = Outcome.truncated(Limit.TEMPLATE)
        return transcript.episode(task, outcome)


def extend(transcript: Transcript, extension: Extension) -> None:
    """Put a rendered reply on the transcript: appended to the row, or as the prompt of a new one."""
    if extension.fork:
        transcript.begin(extension.token_ids)
    else:
        transcript.feedback(extension.token_ids)


def actions_of(row: Row) -> Iterator[tuple[Segment, list[int]]]:
    """The sampled turns of a row, each with the tokens it was sampled after."""
    before: list[int] = []
    for segment in row.segments:
        if segment.role == "action":
            yield segment, before[:]
        before.extend(segment.token_ids)
