"""The multi-turn agent: plays an environment until it ends or a limit does. It plays single-turn ones just as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from envgym.agent import AgentConfig
from envgym.env import CheckedEnv
from envgym.rollout.transcript import Transcript
from envgym.types import Action, Limit, Message, Observation, Outcome, Task

from .token_level import TokenLevel, TokenLevelConfig


class MultiTurnConfig(TokenLevelConfig):
    """Settings of the multi-turn agent."""

    max_turns: int | None = Field(None, ge=1)
    """Turns after which the episode ends, truncated (`turns`); unset: as many as the environment allows."""


class MultiTurn(TokenLevel):
    """Observation, action, observation, … until the environment ends the episode.

    Later observations are appended to the tokens there are. Where the chat template does not allow that (it drops
    earlier thoughts, say), the episode goes on in a new row. A turn cut by its token limit is played like any other:
    the environment sees its `stop_reason`.
    """

    Config: ClassVar[type[AgentConfig]] = MultiTurnConfig
    config: MultiTurnConfig
    by_messages: ClassVar[Mapping[str, Any] | None] = {"name": "chat", "tools": False}

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        dialogue = self.renderer.dialogue()
        transcript.messages = dialogue.messages
        transcript.begin(dialogue.begin(self.offered(observation)))
        turns = 0
        while True:
            generation = await transcript.sample(observation.sampling)
            message = dialogue.add_policy_turn(generation.token_ids)
            calls, said = message.tool_calls, dialogue.content
            token_ids, content = tuple(generation.token_ids), said if calls else None
            action = Action(message.text, token_ids, calls, generation.stop_reason, content)
            observation, reward, terminated, truncated, info = await env.step(action)
            transcript.paid(reward, info)
            turns += 1
            if terminated or truncated or turns == self.config.max_turns:
                # The policy never reads what is said at the end; people do.
                transcript.messages = [*dialogue.messages, *closing(observation)]
                if terminated:
                    return Outcome.completed()
                return Outcome.truncated(Limit.ENVIRONMENT if truncated else Limit.TURNS)
            extension = dialogue.add_observation(observation)
            if extension.fork:
                transcript.begin(extension.token_ids)
            else:
                transcript.feedback(extension.token_ids)

    def offered(self, observation: Observation) -> Observation:
        """The first observation as the policy sees it: without tools, which this agent cannot call."""
        return replace(observation, tools=())


def closing(observation: Observation) -> list[Message]:
    """What an environment said, as messages."""
    return [Message.of("user", observation.text)] if observation.text else list(observation.messages)
