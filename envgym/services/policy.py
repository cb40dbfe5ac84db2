"""The client of the policy in training: opponents and self-play."""

from __future__ import annotations

import hashlib
import json
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envgym.engine import Engine, Request, SamplingParams
from envgym.errors import InvalidOutcome, PromptTooLong, reported_as
from envgym.render.spelling import by_others
from envgym.types import Observation, as_messages, int_array

from .client import ChatClient, Conversation

if TYPE_CHECKING:
    from envgym.render import Renderer
    from envgym.rollout.sampler import Waves

WAVES: ContextVar[Waves | None] = ContextVar("WAVES", default=None)
"""The waves in which the asking episode's requests wait for those of others, in a deterministic run. The runner sets
it: what an opponent samples is then part of the same waves, and as repeatable."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The engine that samples the policy, and how it is asked."""

    renderer: Renderer
    engine: Engine
    max_model_len: int
    deterministic: bool
    seed: int


class PolicyClient(ChatClient):
    """Samples the run's own engine, with the weights it has at that moment. Usable once the engine runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._bound: Bound | None = None

    def bind(self, bound: Bound) -> None:
        """Sample with these from now on."""
        self._bound = bound

    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        waves = WAVES.get()  # here, in the task of the episode that asks
        return await self._at_home(self._complete(messages, max_tokens, temperature, seed, waves))

    async def _complete(
        self, messages: Conversation, max_tokens: int, temperature: float, seed: int | None, waves: Waves | None
    ) -> str:
        if self._bound is None:
            raise InvalidOutcome(
                "service", f"service {self._name} is the policy in training, and none is being sampled here"
            )
        bound = self._bound
        dialogue = bound.renderer.dialogue()
        ids = dialogue.begin(Observation(messages=by_others(as_messages(messages))))
        stop = tuple(bound.renderer.stop_token_ids)
        sampling = SamplingParams(max_tokens, temperature, stop_token_ids=stop)
        with reported_as(PromptTooLong, f"service {self._name}", of=PromptTooLong):
            sampling = sampling.within(bound.max_model_len, len(ids))
        self.counters["requests"] += 1
        asked = hashlib.sha256(json.dumps([bound.seed, seed, ids]).encode()).hexdigest()
        if seed is None and bound.deterministic:
            seed = int(asked[:8], 16) >> 1  # the same question, the same answer
        sampling = replace(sampling, seed=seed)
        # Waves are sorted by id: what is asked comes first in it, so that the order does not depend on timing. The
        # count makes it unique; it decides only between equal requests.
        request = Request(f"{self._name}.{asked[:16]}.{self.counters['requests']:08d}", int_array(ids), sampling)
        generation = await (waves or bound.engine).generate(request)
        return dialogue.add_policy_turn(generation.token_ids).text
