"""The multi-turn agents, with and without tools. An episode runs until the environment or a limit ends it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from envgym.agent import AgentConfig
from envgym.env import CheckedEnv
from envgym.render.renderer import sampling_of
from envgym.rollout.transcript import Transcript
from envgym.types import Action, Observation, Outcome, Task, observed_messages

from .token_level import TokenLevel, TokenLevelConfig, extend


class MultiTurnConfig(TokenLevelConfig):
    """Settings of the multi-turn agent."""

    max_turns: int | None = Field(None, ge=1)
    """Turns after which the episode ends, truncated (`turns`); unset: as many as the environment allows."""


class MultiTurn(TokenLevel):
    """Observation, action, observation, … until the environment ends the episode.

    Later observations are appended to the row's tokens. If the chat template does not allow that (it drops earlier
    thoughts, say), the episode continues in a new row. A turn truncated by its token limit is passed to the environment
    like any other, with its `stop_reason`.
    """

    Config: ClassVar[type[AgentConfig]] = MultiTurnConfig
    config: MultiTurnConfig
    chat_agent: ClassVar[Mapping[str, Any] | None] = {"name": "chat", "tools": False}

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        dialogue = self.renderer.dialogue()
        transcript.messages = dialogue.messages
        transcript.start_row(dialogue.start(self.offered(observation)))
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

    def offered(self, observation: Observation) -> Observation:
        """The first observation as the policy sees it: without tools, since this agent cannot call any."""
        return replace(observation, tools=())


class ToolCalling(MultiTurn):
    """A multi-turn agent that writes tools into the prompt, and reads calls from the answers, in the chat template's
    format.

    The environment gets the calls in `action.tool_calls`, malformed ones with their `error`, and answers with the
    results. Without tools it behaves like the multi-turn agent.
    """

    chat_agent: ClassVar[Mapping[str, Any] | None] = {"name": "chat", "tools": True}

    def offered(self, observation: Observation) -> Observation:
        return observation
