"""The chat agent: runs episodes on messages, for engines without a token interface."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from envgym.agent import Agent, AgentConfig, OutOfBudget, Sampler
from envgym.engine import ChatReply
from envgym.env import CheckedEnv
from envgym.errors import InvalidStep, PromptTooLong
from envgym.transcript import EMPTY_ANSWERS, Transcript
from envgym.types import Action, Episode, Limit, Outcome, StopReason, Task, Turn, observed_messages

from .token_level import ToolCallingConfig

TOKEN_COUNTS = ("prompt_tokens", "completion_tokens")


class ChatAgent(Agent):
    """Observation, action, observation, … until the environment ends the episode. Raw text becomes a user message.

    The episode has one row, without tokens, that holds its turns. Its metrics `prompt_tokens` and `completion_tokens`
    are the API's counts, summed over all turns; they are absent if the API did not count every turn.
    """

    Config: ClassVar[type[AgentConfig]] = ToolCallingConfig
    config: ToolCallingConfig
    interface = "messages"

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        sampler.limit(self.config.max_tokens)
        observation, _ = await env.reset(seed=seed, options={"task": task})
        transcript = Transcript(sampler)
        transcript.start_row([])
        transcript.messages += observed_messages(observation)
        if not transcript.messages:
            raise InvalidStep("the first observation has neither messages nor text")
        row, tools = transcript.rows[0], observation.tools if self.config.tools else ()
        self.renderer.opening(replace(observation, tools=tools))
        replies: list[ChatReply] = []
        outcome: Outcome | None = None
        while outcome is None:
            try:
                reply = await sampler.chat(transcript.messages, tools, observation.sampling)
            except OutOfBudget as limit:
                outcome = Outcome.truncate(limit.reason)
                break
            except PromptTooLong:
                if not replies:
                    raise
                outcome = Outcome.truncate(Limit.CONTEXT)
                break
            replies.append(reply)
            row.turns.append(Turn(None, reply.stop_reason))
            transcript.messages.append(reply.message)
            action = Action(reply.message.text, tool_calls=reply.message.tool_calls, stop_reason=reply.stop_reason)
            observation, reward, terminated, truncated, info = await env.step(action)
            transcript.add_reward(reward, info)
            transcript.messages += observed_messages(observation)
            if terminated or truncated or len(replies) == self.config.max_turns:
                outcome = Outcome.from_step(terminated, truncated)
            if self.config.tools:
                tools = observation.tools or tools
        empty_replies = [reply for reply in replies if not reply.message.text and not reply.message.tool_calls]
        if n_empty := sum(reply.stop_reason is StopReason.STOP for reply in empty_replies):
            transcript.metrics[EMPTY_ANSWERS] = n_empty
        for name in TOKEN_COUNTS:
            counts = [getattr(reply, name) for reply in replies]
            if None not in counts:
                transcript.metrics[name] = sum(counts)
        return transcript.episode(task, outcome)
