"""The record of an episode's tokens, through which an agent samples.

The engine gets exactly the recorded tokens, and its completion is recorded unchanged. So an agent that uses a
transcript cannot train on other tokens than those it sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
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

EMPTY_ANSWERS = "empty_answers"
"""Name of a metric: the number of an API's answers without text and tool calls that ended by themselves. Absent if it
is 0."""


class Transcript:
    """A running episode: its token sequences (`rows`), the last of which is the context for sampling, and the
    environment's rewards, score, answer and metrics so far. `messages` is the conversation, for people."""

    def __init__(self, engine: Sampler | None, *, is_whole: bool = True) -> None:
        """With `is_whole` it records the sampler's whole episode: if that fails, the runner makes its record from
        here."""
        self.rows: list[Row] = []
        self.messages: list[Message] = []
        self.score: float | None = None
        self.answer: str | None = None
        self.metrics: dict[str, float] = {}
        self.context = array("i")
        self._engine = engine
        if engine is not None and is_whole:
            engine.record = self.episode

    def start_row(self, token_ids: Iterable[int]) -> None:
        """Start a token sequence with this prompt: the first, or a new one if the context does not extend the last."""
        prompt = Segment("prompt", int_array(token_ids))
        self.rows.append(Row([prompt]))
        self.context = prompt.token_ids[:]

    def add_feedback(self, token_ids: Iterable[int]) -> None:
        """Append tokens that are masked in the loss: the environment's feedback, or a template's text between turns."""
        feedback = Segment("feedback", int_array(token_ids))
        if feedback.token_ids:
            self._append(feedback)

    async def sample(self, overrides: Mapping[str, Any] | None = None) -> Generation:
        """Sample a turn after the current token sequence and append it.

        `overrides` replace sampling parameters for this turn only. Raises `OutOfBudget` if the episode's token limit is
        used up or, after the first turn, the context is full; `PromptTooLong` if the first prompt fills the context.
        """
        assert self._engine is not None, "a sampling agent needs an engine"
        try:
            generation = await self._engine.generate(self.context, overrides)
        except PromptTooLong:
            if not self.rows[0].turns:
                raise
            raise OutOfBudget(Limit.CONTEXT) from None
        self.record(generation, self._engine.sampling.with_overrides(overrides).temperature)
        return generation

    def record(self, generation: Generation, temperature: float) -> None:
        """Append a turn that was sampled after the current token sequence."""
        ids, logprobs = int_array(generation.token_ids), float_array(generation.logprobs)
        sampled = Segment("action", ids, logprobs=logprobs, versions=generation.versions, temperature=temperature)
        self._append(sampled, Turn(None, generation.stop_reason))

    def add_demonstration(
        self, token_ids: Iterable[int], stop_reason: StopReason = StopReason.STOP, weights: Sequence[float] = ()
    ) -> None:
        """Append a turn of a demonstration, which was not sampled; `weights` are those of its tokens in the loss, by
        default 1."""
        self.rows[-1].objective = Objective.CROSS_ENTROPY
        ids = int_array(token_ids)
        self._append(Segment("action", ids, array("f", weights or [1.0] * len(ids))), Turn(None, stop_reason))

    def _append(self, segment: Segment, *turns: Turn) -> None:
        self.rows[-1].segments.append(segment)
        self.rows[-1].turns += turns
        self.context.extend(segment.token_ids)

    def add_reward(self, reward: float | None, info: Mapping[str, Any]) -> None:
        """Record the environment's reward and info for the last turn. The episode has the last score, the last answer
        and the last value of each metric."""
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
        """The finished episode. Its reward is the sum over turns. Without a score, a reward in [0, 1] is the score
        unless another episode of the environment has a reward outside [0, 1] (`envgym.episodes.scores`).

        If the token limit truncated the last completion, the episode is truncated (`length`).
        """
        if self.stop_reason is StopReason.LENGTH and outcome.reason in ("", Limit.TURNS):
            outcome = Outcome.truncate(Limit.LENGTH)
        for row in self.rows:  # drop feedback that no turn follows: the policy may not have had context for it
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
