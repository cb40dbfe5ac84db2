"""An engine bound to one episode, and the waves that make sampling repeatable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envgym.engine import ChatEngine, ChatReply, ChatRequest, Engine, Generation, Request, SamplingParams
from envgym.hashing import derived_seed
from envgym.types import Message, Span, ToolSpec, timed


class Waves:
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
    """The sampler of an agent: the engine, under the episode's own request ids, seeds and parameters."""

    engine: Engine | Waves | ChatEngine
    episode_id: str
    sampling: SamplingParams
    max_model_len: int
    seed: int | None = None
    turn: int = field(default=0, init=False)
    has_ended: bool = field(default=False, init=False)
    spans: list[Span] = field(default_factory=list, init=False)

    def end(self) -> None:
        """Answer no more: the episode is over, though something may not know it."""
        self.has_ended = True

    async def generate(self, token_ids: list[int], overrides: Mapping[str, Any] | None = None) -> Generation:
        assert not isinstance(self.engine, ChatEngine), "an agent that speaks tokens is given an engine that does"
        sampling = self._of_this_turn(overrides).within(self.max_model_len, len(token_ids))
        request = Request(f"{self.episode_id}.{self.turn:04d}", tuple(token_ids), sampling)
        self.turn += 1
        with timed(self.spans, "generating"):
            return await self.engine.generate(request)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), overrides: Mapping[str, Any] | None = None
    ) -> ChatReply:
        assert isinstance(self.engine, ChatEngine), "an agent that speaks messages is given an engine that does"
        sampling = self._of_this_turn(overrides)
        request = ChatRequest(f"{self.episode_id}.{self.turn:04d}", tuple(messages), tuple(tools), sampling)
        self.turn += 1
        with timed(self.spans, "generating"):
            return await self.engine.chat(request)

    def _of_this_turn(self, overrides: Mapping[str, Any] | None) -> SamplingParams:
        """The sampling parameters of the next turn."""
        if self.has_ended:
            raise asyncio.CancelledError("the episode is over")
        sampling = self.sampling.overridden(overrides)
        return sampling if self.seed is None else replace(sampling, seed=derived_seed(self.seed, self.turn))
