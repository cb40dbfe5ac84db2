"""The client of the policy in training: opponents and self-play."""

from __future__ import annotations

import hashlib
import json
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envgym.engine import Engine, Request, SamplingParams
from envgym.errors import InvalidOutcome, PromptTooLong, reported_as
from envgym.render.spelling import mark_from_others
from envgym.types import Observation, as_messages, int_array

from .client import ChatClient, Conversation

if TYPE_CHECKING:
    from envgym.render import Renderer
    from envgym.transcript import LockstepBatcher

LOCKSTEP: ContextVar[LockstepBatcher | None] = ContextVar("LOCKSTEP", default=None)
"""In a deterministic run, the batcher that holds an episode's requests until those of the other episodes have come. The
runner sets it, so that opponents sample in the same batches, repeatably."""


@dataclass(frozen=True, slots=True)
class PolicyEngine:
    """The engine that samples the policy, and its settings."""

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
        self._bound: PolicyEngine | None = None

    def bind(self, bound: PolicyEngine) -> None:
        """Sample with `bound` from now on."""
        self._bound = bound

    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        sampling = SamplingParams(max_tokens, temperature, seed=seed)
        lockstep = LOCKSTEP.get()  # here, in the task of the episode that asks
        return await self._in_home_loop(self._sample(messages, sampling, lockstep))

    async def _sample(self, messages: Conversation, sampling: SamplingParams, lockstep: LockstepBatcher | None) -> str:
        """The policy's answer to a conversation. Raises `InvalidOutcome` if no policy is bound, `PromptTooLong` for a
        conversation that leaves no room."""
        if self._bound is None:
            raise InvalidOutcome(
                "service", f"service {self._name} is the policy in training, which no engine samples here"
            )
        bound = self._bound
        dialogue = bound.renderer.dialogue()
        opening = dialogue.begin(Observation(messages=mark_from_others(as_messages(messages))))
        ids, images = opening.token_ids, opening.images
        stop = tuple(bound.renderer.stop_token_ids)
        with reported_as(PromptTooLong, f"service {self._name}", cause=PromptTooLong):
            sampling = replace(sampling, stop_token_ids=stop).within_context(bound.max_model_len, len(ids))
        self.counters["requests"] += 1
        described = [bound.seed, sampling.seed, ids, *(placed.image.sha256 for placed in images)]
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        if sampling.seed is None and bound.deterministic:
            sampling = replace(sampling, seed=int(digest[:8], 16) >> 1)  # the same request gets the same answer
        # Lockstep batches are sorted by id: the digest comes first in it, so that the order does not depend on timing.
        # The count makes it unique, and decides only between equal requests. The last part is the turn's.
        name = f"{self._name}.{digest[:16]}-{self.counters['requests']:08d}.0"
        request = Request(name, int_array(ids), sampling, images=images)
        generation = await (lockstep or bound.engine).generate(request)
        return dialogue.add_policy_turn(generation.token_ids).text
