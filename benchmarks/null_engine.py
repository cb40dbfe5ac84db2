"""An engine that immediately returns as many tokens as requested: only the controller's own work takes time."""

from __future__ import annotations

from dataclasses import dataclass

from envgym.engine import EngineInfo, Generation, Request
from envgym.processes.runtime import InlineWorker
from envgym.types import StopReason, VersionSpan, float_array, int_array


class NullEngine:
    """Answers every request with `max_tokens` tokens, the last of which ends the turn.

    `letter` is the token id that it repeats, `end` the one that ends a turn; `max_model_len` is in tokens.
    """

    def __init__(self, letter: int, end: int, max_model_len: int) -> None:
        self._letter, self._end, self._max_model_len = letter, end, max_model_len

    async def info(self) -> EngineInfo:
        return EngineInfo("null", self._max_model_len)

    async def generate(self, request: Request) -> Generation:
        n = request.sampling.max_tokens
        return Generation(
            token_ids=int_array([self._letter] * (n - 1) + [self._end]),
            logprobs=float_array([-0.5]) * n,
            stop_reason=StopReason.STOP,
            versions=(VersionSpan(0, 0, n),),
        )

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class NullReference:
    """An engine that every process makes for itself, so that it takes no other process's time."""

    letter: int
    end: int
    max_model_len: int

    async def open(self) -> NullHandle:
        return NullHandle(self)


class NullHandle(InlineWorker):
    def __init__(self, reference: NullReference) -> None:
        super().__init__("engine", NullEngine(reference.letter, reference.end, reference.max_model_len))
        self._reference = reference

    async def reference(self) -> NullReference:
        return self._reference
