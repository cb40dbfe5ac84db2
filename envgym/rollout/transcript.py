"""The record of an episode's tokens, which is also the only way an agent samples.

What the engine is given is exactly what has been recorded, and what it returns is recorded as it came: an agent
written on a transcript cannot train on other tokens than it sampled from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from envgym.agent import OutOfBudget, Sampler
from envgym.engine import Generation
from envgym.episodes.scores import reward_as_score
from envgym.errors import PromptTooLong
from envgym.types import (
    Episode,
    Limit,
    Message,
    Objective,
    Outcome,
    Row,
    Segment,
    StopReason,
    Task,
    Turn,
    float_array,
    int_array,
)


class Transcript:
    """An episode while it is played: its rows, the last of which is the context that is sampled from, and what the
    environment has given for it so far. `messages` is the conversation, for people.

    `max_tokens` bounds what the whole episode may sample.
    """

    def __init__(self, engine: Sampler | None, *, max_tokens: int | None = None) -> None:
        self.rows: list[Row] = []
        self.messages: list[Message] = []
        self.score: float | None = None
        self.answer: str | None = None
        self.metrics: dict[str, float] = {}
        self.context = array("i")
        self._engine = engine

    def begin(self, token_ids: Iterable[int]) -> None:
        """Start a row with these tokens as its prompt: the first, or one whose context is not the old one grown."""
        prompt = Segment("prompt", int_array(token_ids))
        self.rows.append(Row([prompt]))
        self.context = prompt.token_ids[:]

    def feedback(self, token_ids: Iterable[int]) -> None:
        """Append tokens that nobody is trained on: the environment's feedback, or a template's glue."""
        feedback = Segment("feedback", int_array(token_ids))
        if feedback.token_ids:
            self._append(feedback)

    async def sample(self, overrides: Mapping[str, Any] | None = None) -> Generation:
        """Sample a turn after the current row and append it.

        `overrides` replace sampling parameters for this turn alone. Raises `OutOfBudget` where the episode has no
        token left, or its context no room after the first turn; a first prompt without room is `PromptTooLong`.
        """
        assert self._engine is not None, "a sampling agent is given an engine"
        try:
            generation = await self._engine.generate(self.context, overrides)
        except PromptTooLong:
            if not self.rows[0].turns:
                raise
            raise OutOfBudget(Limit.CONTEXT) from None
        self.record(generation, (overrides or {}).get("temperature", self._engine.sampling.temperature))
        return generation

    def record(self, generation: Generation, temperature: float) -> None:
        """Append a turn that was sampled after the current row."""
        ids, logprobs = int_array(generation.token_ids), float_array(generation.logprobs)
        sampled = Segment("action", ids, logprobs=logprobs, versions=generation.versions, temperature=temperature)
        self._append(sampled, Turn(None, generation.stop_reason))

    def demonstrate(self, token_ids: Iterable[int], stop_reason: StopReason = StopReason.STOP) -> None:
        """Append a turn that was not sampled but shown."""
        self.rows[-1].objective = Objective.CROSS_ENTROPY
        self._append(Segment("action", int_array(token_ids)), Turn(None, stop_reason))

    def _append(self, segment: Segment, *turns: Turn) -> None:
        self.rows[-1].segments.append(segment)
        self.rows[-1].turns += turns
        self.context.extend(segment.token_ids)

    def add_reward(self, reward: float | None, info: Mapping[str, Any]) -> None:
        """Record the environment's reward and info for the last turn. The last score, answer and value of each metric
        stand."""
        self.rows[-1].turns[-1].reward = reward
        if info.get("score") is not None:
            self.score = float(info["score"])
        if info.get("answer") is not None:
            self.answer = str(info["answer"])
        self.metrics |= info.get("metrics") or {}

    @property
    def stop_reason(self) -> StopReason | None:
        """Reason why the last turn ended; None before the first."""
        return next((row.turns[-1].stop_reason for row in reversed(self.rows) if row.turns), None)

    def episode(self, task: Task, outcome: Outcome) -> Episode:
        """The episode as a whole: rewards add up, and a reward in [0, 1] is a score where none was given, until the
        environment's other rewards show that it is none (`envgym.episodes.scores`).

        Where the last answer was cut by its token limit the episode is truncated (`length`): what it earned is of a
        part of an answer.
        """
        if self.stop_reason is StopReason.LENGTH and outcome.reason in ("", Limit.TURNS):
            outcome = Outcome.truncate(Limit.LENGTH)
        for row in self.rows:  # what the policy never answered, and perhaps never had room to read
            while row.segments and row.segments[-1].role != "action":
                row.segments.pop()
        self.rows = [row for row in self.rows if row.turns]
        rewards = [turn.reward for row in self.rows for turn in row.turns if turn.reward is not None]
        reward = sum(rewards) if rewards else None
        score = reward_as_score(reward) if self.score is None else self.score
        return Episode(
            id="",
            task=task,
            outcome=outcome,
            rows=self.rows,
            reward=reward,
            score=score,
            score_is_reward=self.score is None and score is not None,
            answer=self.answer,
            metrics=self.metrics,
            messages=self.messages,
        )
