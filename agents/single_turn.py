"""The single-turn agent: one observation, one answer, one reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from envgym.env import CheckedEnv
from envgym.render.renderer import sampling_of
from envgym.rollout.transcript import Transcript
from envgym.types import Action, Limit, Outcome, Task, observed_messages

from .token_level import TokenLevel


class SingleTurn(TokenLevel):
    """Samples one answer to the first observation. An environment that wants more turns truncates the episode."""

    chat_agent: ClassVar[Mapping[str, Any] | None] = {"name": "chat", "tools": False, "max_turns": 1}

    async def play(self, env: CheckedEnv, task: Task, transcript: Transcript, *, seed: int) -> Outcome:
        observation, _ = await env.reset(seed=seed, options={"task": task})
        dialogue = self.renderer.dialogue()
        transcript.start_row(dialogue.start(replace(observation, tools=())))
        generation = await transcript.sample(sampling_of(observation, self.renderer))
        message = dialogue.add_policy_turn(generation.token_ids)
        action = Action(message.text, generation.token_ids, stop_reason=generation.stop_reason)
        observation, reward, terminated, _, info = await env.step(action)
        transcript.add_reward(reward, info)
        transcript.messages = [*dialogue.messages, *observed_messages(observation)]
        return Outcome.finish() if terminated else Outcome.truncate(Limit.TURNS)
