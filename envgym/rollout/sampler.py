"""An engine bound to one episode, and the waves that make sampling repeatable."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envgym.agent import OutOfBudget
from envgym.engine import ChatEngine, ChatReply, ChatRequest, Engine, Generation, Request, SamplingParams
from envgym.errors import InvalidOutcome
from envgym.hashing import derived_seed
from envgym.types import Limit, Message, Span, ToolSpec, int_array, timed


class LockstepBatcher:
    """Holds requests back until every episode in play waits for one, then submits them together, sorted.

    In that order, and with a seed each, an engine gives the same bits again: which requests share a batch no
    longer depends on timing. `episodes` are still to end, `concurrency` of them are in play at once.
    """

    def __init__(self, engine: Engine, episodes: int, concurrency: int) -> None:
        self._engine = engine
        self._left = episodes
        self._concurrency = concurrency
        self._waiting: list[tuple[Request, asyncio.Future[Generation]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def leave(self) -> None:
        """An episode has ended and will ask for nothing more."""
        self._left -= 1
        self._submit_if_complete()

    async def generate(self, request: Request) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._submit_if_complete()
        try:
            return await future
        except asyncio.CancelledError:  # the episode's deadline: it no longer waits, and must not complete a wave
            self._waiting = [item for item in self._waiting if item[1] is not future]
            raise

    def _submit_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < min(self._left, self._concurrency):
            return
        wave, self._waiting = sorted(self._waiting, key=lambda item: item[0].id), []
        for request, future in wave:  # tasks start in the order they are made: one tick, one sorted wave
            task = asyncio.create_task(self._forward(request, future))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, request: Request, future: asyncio.Future[Generation]) -> None:
        try:
            generation = await self._engine.generate(request)
        except Exception as error:  # handed on to the episode that asked
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(generation)


@dataclass(slots=True)
class EpisodeSampler:
    """The sampler of an agent: the engine, under the episode's own request ids, seeds, parameters and budget.

    Requests in parallel share the budget: each reserves the most it may sample and gives back the rest. One that finds
    too little waits for the others, and is cut only where they have left no more.
    """

    engine: Engine | LockstepBatcher | ChatEngine
    episode_id: str
    sampling: SamplingParams
    max_model_len: int
    seed: int | None = None
    turn: int = field(default=0, init=False)
    has_ended: bool = field(default=False, init=False)
    spans: list[Span] = field(default_factory=list, init=False)
    _left: float = field(default=math.inf, init=False)
    """Tokens that may still be sampled, those reserved for requests in flight excluded."""
    _in_flight: int = field(default=0, init=False)
    _returned: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def limit(self, max_tokens: int | None) -> None:
        self._left = math.inf if max_tokens is None else max_tokens

    def end(self) -> None:
        """Answer no more: the episode is over, though something may not know it."""
        self.has_ended = True

    async def generate(self, token_ids: Sequence[int], overrides: Mapping[str, Any] | None = None) -> Generation:
        assert not isinstance(self.engine, ChatEngine), "an agent that speaks tokens is given an engine that does"
        sampling, sampled = await self._reserve(overrides), 0
        try:
            fitting = sampling.within(self.max_model_len, len(token_ids))
            with timed(self.spans, "generating"):
                generation = await self.engine.generate(Request(self._request_id, int_array(token_ids), fitting))
            sampled = len(generation.token_ids)
            return generation
        finally:
            self._give_back(sampling.max_tokens, sampled)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), overrides: Mapping[str, Any] | None = None
    ) -> ChatReply:
        assert isinstance(self.engine, ChatEngine), "an agent that speaks messages is given an engine that does"
        sampling = await self._reserve(overrides)
        sampled: int | None = 0
        try:
            request = ChatRequest(self._request_id, tuple(messages), tuple(tools), sampling)
            with timed(self.spans, "generating"):
                reply = await self.engine.chat(request)
            sampled = reply.completion_tokens
            return reply
        finally:
            self._give_back(sampling.max_tokens, sampled)

    @property
    def _request_id(self) -> str:
        return f"{self.episode_id}.{self.turn - 1:04d}"

    async def _reserve(self, overrides: Mapping[str, Any] | None) -> SamplingParams:
        """Begin the next turn: its sampling parameters, with no more tokens than the episode has left."""
        sampling = self.sampling.overridden(overrides)
        while self._in_flight and self._left < sampling.max_tokens:
            self._returned.clear()
            await self._returned.wait()
        if self.has_ended:
            raise asyncio.CancelledError("the episode is over")
        if math.isnan(self._left):
            raise InvalidOutcome("engine", "the API does not say how many tokens it sampled, as agent.max_tokens needs")
        if self._left < 1:
            raise OutOfBudget(Limit.TOKENS)
        if self._left < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=int(self._left))
        if self.seed is not None:
            sampling = replace(sampling, seed=derived_seed(self.seed, self.turn))
        self._left -= sampling.max_tokens
        self._in_flight += 1
        self.turn += 1
        return sampling

    def _give_back(self, reserved: int, sampled: int | None) -> None:
        """A turn has ended that had `reserved` tokens and sampled so many of them; None: the engine does not say."""
        if not math.isinf(self._left):
            self._left += math.nan if sampled is None else reserved - sampled
        self._in_flight -= 1
        self._returned.set()
