"""The base class of agents that control the policy's exact tokens, and helpers that other agents share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, OutOfBudget, Sampler
from envgym.env import CheckedEnv
from envgym.errors import TurnRefused
from envgym.render import Extension
from envgym.transcript import Transcript
from envgym.types import Episode, Limit, Outcome, Row, Segment, Task


class TokenLevelConfig(AgentConfig):
    """Settings of every agent that samples on a transcript."""

    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample per episode; then it ends, truncated (`tokens`). One turn's limit is
    `rollout.max_tokens`."""


class TokenLevel(Agent):
    """Subclass it and write `play`: put tokens on the transcript, sample from it, and return how the episode ended.

    Sampled tokens are recorded unmodified, and every prompt consists of recorded tokens.
    """

    Config: ClassVar[type[AgentConfig]] = TokenLevelConfig
    config: TokenLevelConfig

    @abstractmethod
    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        """Run one episode. `OutOfBudget` may pass through: it truncates the episode."""

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        sampler.limit(self.config.max_tokens)
        transcript = Transcript(sampler)
        try:
            outcome = await self.play(env, task, transcript, seed=seed)
        except OutOfBudget as limit:
            outcome = Outcome.truncate(limit.reason)
        except TurnRefused:
            outcome = Outcome.truncate(Limit.TEMPLATE)
        return transcript.episode(task, outcome)


def extend(transcript: Transcript, extension: Extension) -> None:
    """Add a rendered reply to the transcript: to the current row, or as the prompt of a new row."""
    if extension.fork:
        transcript.start_row(extension.token_ids)
    else:
        transcript.add_feedback(extension.token_ids)


def actions_of(row: Row) -> Iterator[tuple[Segment, list[int]]]:
    """The sampled turns of a row, each with its prefix tokens."""
    prefix: list[int] = []
    for segment in row.segments:
        if segment.role == "action":
            yield segment, prefix[:]
        prefix.extend(segment.token_ids)
