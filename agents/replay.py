"""The replay agent: replays an environment's recordings instead of sampling, for supervised training."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.env import CheckedEnv
from envgym.errors import InvalidOutcome
from envgym.rollout.scripted import action_of
from envgym.transcript import Transcript
from envgym.types import Episode, Limit, Message, Observation, Outcome, Task

from .token_level import extend


class ReplayConfig(AgentConfig):
    """Settings of replays."""

    max_tokens: int | None = Field(None, ge=2)
    """Maximum tokens of a recording's row; unset: no limit."""
    too_long: Literal["cut", "drop"] = "cut"
    """`cut`: truncate a longer row and do not train on an end there; `drop`: drop its episode (`too_long`)."""


class Replay(Agent):
    """Replays the recorded turns of a task. It needs no engine, and steps the environment only for the observations
    between two turns: recordings are trained on unmodified, whatever reward the environment would give them."""

    Config: ClassVar[type[AgentConfig]] = ReplayConfig
    config: ReplayConfig
    uses_policy = False

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        return await self.replay(env, task, seed=seed, recording_index=0)

    async def replay(self, env: CheckedEnv, task: Task, *, seed: int, recording_index: int) -> Episode:
        observation, _ = await env.reset(seed=seed, options={"task": task, "member": recording_index})
        recording = env.spec.recording(task, seed, recording_index)
        dialogue, transcript = self.renderer.dialogue(), Transcript(None)
        extend(transcript, dialogue.begin(observation))
        last = len(recording.turns) - 1
        rewards = recording.rewards or [None] * (last + 1)
        for number, (turn, reward) in enumerate(zip(recording.turns, rewards, strict=True)):
            if recording.is_single_turn and number < last:
                # A part of an answer, without an end of turn.
                text = turn if isinstance(turn, str) else turn.text
                transcript.add_demonstration(dialogue.add_observation(Observation(text=text)).token_ids)
                transcript.add_reward(reward, {})
                continue
            token_ids = dialogue.add_demonstration(turn)
            transcript.add_demonstration(token_ids, weights=self._weights(turn, token_ids))
            transcript.add_reward(reward, {"metrics": recording.metrics})
            if number == last:
                break
            observation, _, terminated, truncated, _ = await env.step(action_of(turn, token_ids))
            if terminated or truncated:
                raise InvalidOutcome("demonstration", f"{task.key}: it continues after the episode has ended")
            extend(transcript, dialogue.add_observation(observation))
        transcript.messages = dialogue.messages
        return transcript.episode(task, self._limited(transcript, task))

    def _weights(self, turn: str | Message, token_ids: Sequence[int]) -> list[float]:
        """The weights of a turn's tokens in the loss: 0 for those that hold a character not to be learned."""
        message = turn if isinstance(turn, Message) else Message.assistant(turn)

        def position(n_tokens: int) -> int:
            """The character, counted from the end of the turn's text, at which the token `n_tokens` begins."""
            return len(self.renderer.decode_after(token_ids[:n_tokens])) - first - len(message.text)

        weights, numbers = [message.weight] * len(token_ids), range(len(token_ids) + 1)
        first = self.renderer.decode_after(token_ids).find(message.text) if message.unlearned else 0
        if first < 0:
            raise InvalidOutcome("demonstration", "the template changes a turn of which a part is not to be learned")
        for start, end in message.unlearned:
            begin, stop = bisect_right(numbers, start, key=position) - 1, bisect_left(numbers, end, key=position)
            weights[begin:stop] = [0.0] * (stop - begin)
        return weights

    def _limited(self, transcript: Transcript, task: Task) -> Outcome:
        """Truncate rows to the limit, and return the outcome."""
        limit = self.config.max_tokens
        if limit is None or all(len(row) <= limit for row in transcript.rows):
            return Outcome.finish()
        for row in transcript.rows:
            row.truncate(limit)
        is_trained = any(any(part.loss_weights) for row in transcript.rows for part in row.segments)
        if self.config.too_long == "drop" or not is_trained:
            raise InvalidOutcome("too_long", f"{task.key}: the recording has more than agent.max_tokens={limit} tokens")
        return Outcome.truncate(Limit.LENGTH)
