"""The sampling of an episode: an engine bound to it, and the record of its tokens, through which an agent samples.

The engine gets exactly the recorded tokens, and its completion is recorded unchanged. So an agent that uses a
transcript cannot train on other tokens than those it sampled.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from envgym.agent import OutOfBudget, Sampler
from envgym.engine import ChatEngine, ChatReply, ChatRequest, Engine, Generation, Request, SamplingParams
from envgym.episodes.scores import reward_as_score
from envgym.errors import InvalidOutcome, PromptTooLong
from envgym.hashing import derived_seed
from envgym.processes.cancellation import pause_timeouts, start_task
from envgym.types import (
    Episode,
    Limit,
    Message,
    Objective,
    Outcome,
    PlacedImage,
    Row,
    Segment,
    Span,
    StopReason,
    Task,
    ToolSpec,
    Turn,
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
        self.images: list[PlacedImage] = []
        """The images of the context, in order."""
        self._engine = engine
        if engine is not None and is_whole:
            engine.record = self.episode

    def start_row(self, token_ids: Iterable[int], images: Sequence[PlacedImage] = ()) -> None:
        """Start a token sequence with this prompt: the first, or a new one if the context does not extend the last.
        `images` are those among the tokens, in order (`Extension.images`)."""
        spans = tuple([image.span for image in images])
        prompt = Segment("prompt", int_array(token_ids), images=spans)
        self.rows.append(Row([prompt]))
        self.context, self.images = prompt.token_ids[:], [*images]

    def add_feedback(self, token_ids: Iterable[int], images: Sequence[PlacedImage] = ()) -> None:
        """Append tokens that are masked in the loss: the environment's feedback, or a template's text between turns.
        `images` are those among the tokens, in order."""
        spans = tuple([image.span for image in images])
        feedback = Segment("feedback", int_array(token_ids), images=spans)
        if feedback.token_ids:
            self.images += [image.shifted(len(self.context)) for image in images]
            self._append(feedback)

    async def sample(
        self, overrides: Mapping[str, Any] | None = None, cut: Callable[[Generation], Generation] | None = None
    ) -> Generation:
        """Sample a turn after the current token sequence and append it, or the beginning of it that `cut` returns.

        `overrides` replace sampling parameters for this turn only. Raises `OutOfBudget` if the episode's token limit is
        used up or, after the first turn, the context is full; `PromptTooLong` if the first prompt fills the context.
        """
        assert self._engine is not None, "a sampling agent needs an engine"
        try:
            images = (tuple(self.images),) if self.images else ()
            generation = await self._engine.generate(self.context, overrides, *images)
        except PromptTooLong:
            if not self.rows[0].turns:
                raise
            raise OutOfBudget(Limit.CONTEXT) from None
        generation = generation if cut is None else cut(generation)
        sampling = self._engine.sampling
        self.record(generation, (sampling.with_overrides(overrides) if overrides else sampling).temperature)
        return generation

    def record(self, generation: Generation, temperature: float) -> None:
        """Append a turn that was sampled after the current token sequence."""
        spans, logprobs = generation.versions, generation.logprobs
        sampled = Segment("action", generation.token_ids, logprobs=logprobs, versions=spans, temperature=temperature)
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
        unless another episode of the environment has a reward outside [0, 1] (`Runner.withdraw_scores`).

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


class LockstepBatcher:
    """Holds requests until every running episode waits for one, then submits them together, sorted.

    So no batch depends on timing: sorted and seeded, its requests get the same bits in every run. `episodes` is the
    number of episodes that have not ended; at most `concurrency` of them run at a time.
    """

    def __init__(self, engine: Engine, episodes: int, concurrency: int) -> None:
        self._engine = engine
        self._episodes_left = episodes
        self._concurrency = concurrency
        self._waiting: list[tuple[Request, asyncio.Future[Generation]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self) -> None:
        """Stop waiting for requests of one episode, which has ended."""
        self._episodes_left -= 1
        self._submit_if_complete()

    async def generate(self, request: Request) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._submit_if_complete()
        try:
            return await future
        except asyncio.CancelledError:  # at its deadline an episode stops waiting, and must not complete a batch
            self._waiting = [item for item in self._waiting if item[1] is not future]
            raise

    def _submit_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < min(self._episodes_left, self._concurrency):
            return
        batch, self._waiting = sorted(self._waiting, key=lambda item: item[0].id), []
        for request, future in batch:  # tasks start in creation order, so the engine gets the batch sorted
            start_task(self._forward(request, future), self._tasks)

    async def _forward(self, request: Request, future: asyncio.Future[Generation]) -> None:
        try:
            generation = await self._engine.generate(request)
        except Exception as error:  # for the episode of the request
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(generation)


@dataclass(slots=True)
class EpisodeSampler:
    """An agent's sampler: the engine, with the episode's request ids, seeds, sampling parameters and token limit.

    Concurrent requests share the limit: each reserves its maximum and returns the unused tokens. A request that cannot
    reserve its maximum first waits for those in flight, and gets a lower maximum only if that was not enough.
    """

    engine: Engine | LockstepBatcher | ChatEngine
    episode_id: str
    sampling: SamplingParams
    max_model_len: int
    seed: int | None = None
    seconds_left: float = math.inf
    """Seconds that the policy may still take in the engine (`rollout.policy_timeout`)."""
    turn: int = field(default=0, init=False)
    has_ended: bool = field(default=False, init=False)
    spans: list[Span] = field(default_factory=list, init=False)
    record: Callable[[Task, Outcome], Episode] | None = field(default=None, init=False)
    _tokens_left: float = field(default=math.inf, init=False)
    """Tokens that may still be sampled, without those reserved for requests in flight."""
    _in_flight: int = field(default=0, init=False)
    _n_timed: int = field(default=0, init=False)
    _counted_until: float = field(default=0.0, init=False)
    _returned: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def limit(self, max_tokens: int | None) -> None:
        self._tokens_left = math.inf if max_tokens is None else max_tokens

    def end(self) -> None:
        """Reject further requests: the episode is over, but its code may still run."""
        self.has_ended = True

    async def generate(
        self, token_ids: Sequence[int], overrides: Mapping[str, Any] | None = None, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        assert not isinstance(self.engine, ChatEngine), "an agent of tokens needs an engine that takes tokens"
        sampling, sampled = await self._reserve(overrides), 0
        try:
            limited = sampling
            if len(token_ids) + sampling.max_tokens > self.max_model_len:
                limited = sampling.within_context(self.max_model_len, len(token_ids))
            ids = token_ids if isinstance(token_ids, array) else int_array(token_ids)
            request = Request(self._request_id, ids, limited, self.seconds_left, tuple(images))
            with self._timed():
                generation = await self.engine.generate(request)
            sampled = len(generation.token_ids)
            if (n := len(generation.logprobs)) != sampled:
                raise InvalidOutcome("engine", f"the engine's generate returned {n} logprobs for {sampled} tokens")
            return generation
        finally:
            self._release(sampling.max_tokens, sampled)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), overrides: Mapping[str, Any] | None = None
    ) -> ChatReply:
        assert isinstance(self.engine, ChatEngine), "an agent of messages needs an engine that takes messages"
        sampling = await self._reserve(overrides)
        sampled: int | None = 0
        try:
            request = ChatRequest(self._request_id, tuple(messages), tuple(tools), sampling)
            deadline = asyncio.timeout(None if math.isinf(self.seconds_left) else self.seconds_left)
            try:
                with self._timed():
                    async with deadline:
                        reply = await self.engine.chat(request)
            except TimeoutError:
                if deadline.expired():
                    raise OutOfBudget(Limit.TIME) from None
                raise
            sampled = reply.completion_tokens
            return reply
        finally:
            self._release(sampling.max_tokens, sampled)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time with a request in flight, which is the policy's and not the episode's."""
        self._count_seconds()
        self._n_timed += 1
        start = time.time()
        try:
            with pause_timeouts():
                yield
        finally:
            self.spans.append(("generating", round(start, 4), round(time.time(), 4)))
            self._count_seconds()
            self._n_timed -= 1

    def _count_seconds(self) -> None:
        """Subtract the time since the last call from the policy's, if a request was in flight."""
        previous, self._counted_until = self._counted_until, time.monotonic()
        if self._n_timed:
            self.seconds_left -= self._counted_until - previous

    @property
    def _request_id(self) -> str:
        return f"{self.episode_id}.{self.turn - 1:04d}"

    async def _reserve(self, overrides: Mapping[str, Any] | None) -> SamplingParams:
        """Start the next turn. Returns its sampling parameters, limited to the episode's remaining tokens."""
        sampling = self.sampling.with_overrides(overrides) if overrides else self.sampling
        while self._in_flight and self._tokens_left < sampling.max_tokens:
            self._returned.clear()
            await self._returned.wait()
        if self.has_ended:
            raise asyncio.CancelledError("the episode is over")
        if math.isnan(self._tokens_left):
            raise InvalidOutcome("engine", "agent.max_tokens needs the number of sampled tokens: this API reports none")
        if self._tokens_left < 1:
            raise OutOfBudget(Limit.TOKENS)
        if self.seconds_left <= 0:
            raise OutOfBudget(Limit.TIME)
        if self._tokens_left < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=int(self._tokens_left))
        if self.seed is not None:
            sampling = replace(sampling, seed=derived_seed(self.seed, self.turn))
        self._tokens_left -= sampling.max_tokens
        self._in_flight += 1
        self.turn += 1
        return sampling

    def _release(self, reserved: int, sampled: int | None) -> None:
        """End a turn: return the `reserved` tokens that were not sampled. `sampled` is None if the API does not report
        it."""
        if not math.isinf(self._tokens_left):
            self._tokens_left += math.nan if sampled is None else reserved - sampled
        self._in_flight -= 1
        self._returned.set()
