"""The replay agent: plays what an environment has recorded instead of sampling, for supervised training."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv
from envgym.errors import InvalidOutcome
from envgym.render import Dialogue
from envgym.rollout.scripted import action_of
from envgym.rollout.transcript import Transcript
from envgym.types import Episode, Limit, Message, Observation, Outcome, Task

from .token_level import extend


class ReplayConfig(AgentConfig):
    """Settings of replays."""

    max_tokens: int | None = Field(None, ge=2)
    """Tokens of a recording's row; unset: any number."""
    too_long: Literal["cut", "drop"] = "cut"
    """`cut`: a longer row loses its end, and is not taught to end there; `drop`: it is left out (`too_long`)."""


class Replay(Agent):
    """Plays the recorded turns of a task. It needs no engine, and steps the environment only for the observations
    between two turns: a recording is taught as it stands, whatever its reward would be."""

    Config: ClassVar[type[AgentConfig]] = ReplayConfig
    config: ReplayConfig
    uses_policy = False

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        return await self.replay(env, task, seed=seed, member=0)

    async def replay(self, env: CheckedEnv, task: Task, *, seed: int, member: int) -> Episode:
        observation, _ = await env.reset(seed=seed, options={"task": task, "member": member})
        recording = env.spec.recording(task, seed, member)
        dialogue, transcript = self.renderer.dialogue(), Transcript(None)
        transcript.begin(dialogue.begin(observation))
        last = len(recording.turns) - 1
        rewards = recording.rewards or [None] * (last + 1)
        for number, (turn, reward) in enumerate(zip(recording.turns, rewards, strict=True)):
            if recording.are_pieces and number < last:
                transcript.demonstrate(piece(dialogue, turn))
                transcript.add_reward(reward, {})
                continue
            token_ids = dialogue.add_demonstration(turn)
            transcript.demonstrate(token_ids)
            transcript.add_reward(reward, {"metrics": recording.metrics})
            if number == last:
                break
            observation, _, terminated, truncated, _ = await env.step(action_of(turn, token_ids))
            if terminated or truncated:
                raise InvalidOutcome("demonstration", f"{task.key}: it goes on after the episode has ended")
            extend(transcript, dialogue.add_observation(observation))
        transcript.messages = dialogue.messages
        return transcript.episode(task, self._limited(transcript, task))

    def _limited(self, transcript: Transcript, task: Task) -> Outcome:
        """The outcome of a recording whose rows are brought to the limit."""
        limit = self.config.max_tokens
        long = [row for row in transcript.rows if limit is not None and len(row.token_ids) > limit]
        if not long:
            return Outcome.completed()
        assert limit is not None
        for row in long:
            row.cut(limit)
        taught = any(segment.role == "action" for row in transcript.rows for segment in row.segments)
        if self.config.too_long == "drop" or not taught:
            raise InvalidOutcome("too_long", f"{task.key}: the recording has more than agent.max_tokens={limit} tokens")
        return Outcome.truncated(Limit.LENGTH)


def piece(dialogue: Dialogue, turn: str | Message) -> list[int]:
    """The tokens of a piece of an answer, with no end of turn."""
    text = turn if isinstance(turn, str) else turn.text
    return dialogue.add_observation(Observation(text=text)).token_ids
