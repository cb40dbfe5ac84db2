"""Agents that control the policy's exact tokens: their base class, and the agent that samples the policy's turns, with
or without tools. Its names `multi_turn`, `tool_calling` and `single_turn` differ by their defaults alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from envgym.agent import Agent, AgentConfig, OutOfBudget, Sampler
from envgym.env import CheckedEnv
from envgym.errors import TurnRefused
from envgym.render import Extension
from envgym.render.renderer import sampling_of
from envgym.transcript import Transcript
from envgym.types import Action, Episode, Limit, Outcome, Row, Segment, Task, observed_messages


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
    """Add a rendered observation to the transcript: to the current row, or as the prompt of a new row."""
    add = transcript.start_row if extension.fork else transcript.add_feedback
    add(extension.token_ids, extension.images)


def actions_of(row: Row) -> Iterator[tuple[Segment, list[int]]]:
    """The sampled turns of a row, each with its prefix tokens."""
    prefix: list[int] = []
    for segment in row.segments:
        if segment.role == "action":
            yield segment, prefix[:]
        prefix.extend(segment.token_ids)


class MultiTurnConfig(TokenLevelConfig):
    """Settings of `multi_turn`."""

    max_turns: int | None = Field(None, ge=1)
    """Turns after which the episode ends, truncated (`turns`); unset: as many as the environment allows."""
    tools: bool = False
    """Offer the environment's tools, if it has any, and read calls from the answers."""


class MultiTurn(TokenLevel):
    """Observation, action, observation, … until the environment ends the episode.

    Later observations are appended to the row's tokens. If the chat template does not allow that (it drops earlier
    thoughts, say), the episode continues in a new row. A turn truncated by its token limit is passed to the environment
    like any other, with its `stop_reason`.

    With `tools` the prompt has the environment's tools in the chat template's format. The environment gets the calls in
    `action.tool_calls`, malformed ones with their `error`, and answers with the results.
    """

    Config: ClassVar[type[AgentConfig]] = MultiTurnConfig
    config: MultiTurnConfig
    chat_agent: ClassVar[str | None] = "chat"

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        dialogue = self.renderer.dialogue()
        transcript.messages = dialogue.messages
        offered = replace(observation, tools=()) if observation.tools and not self.config.tools else observation
        opening = dialogue.begin(offered)
        transcript.start_row(opening.token_ids, opening.images)
        turns = 0
        while True:
            generation = await transcript.sample(sampling_of(observation, self.renderer))
            message = dialogue.add_policy_turn(generation.token_ids)
            calls = message.tool_calls
            content = dialogue.content if calls else None
            action = Action(message.text, generation.token_ids, calls, generation.stop_reason, content)
            observation, reward, terminated, truncated, info = await env.step(action)
            transcript.add_reward(reward, info)
            turns += 1
            if terminated or truncated or turns == self.config.max_turns:
                # The policy never reads the last observation, but the record shows it.
                transcript.messages = [*dialogue.messages, *observed_messages(observation)]
                return Outcome.from_step(terminated, truncated)
            extend(transcript, dialogue.add_observation(observation))


class ToolCallingConfig(MultiTurnConfig):
    """Settings of `tool_calling`."""

    tools: bool = True


class ToolCalling(MultiTurn):
    """`multi_turn` with tools. In an environment without tools the two are the same."""

    Config: ClassVar[type[AgentConfig]] = ToolCallingConfig
    chat_agent: ClassVar[str | None] = "chat"


class SingleTurnConfig(MultiTurnConfig):
    """Settings of `single_turn`."""

    max_turns: int | None = Field(1, ge=1)


class SingleTurn(MultiTurn):
    """`multi_turn` with one turn: an environment that continues after it truncates the episode."""

    Config: ClassVar[type[AgentConfig]] = SingleTurnConfig
    chat_agent: ClassVar[str | None] = "chat"
