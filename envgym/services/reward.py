"""The client of a reward model in a worker process."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

from envgym.errors import InvalidOutcome, WorkerDied, WorkerError
from envgym.types import as_messages
from envgym.workers.runtime import Runtime, WorkerHandle

from .batches import Batcher
from .client import Assessment, Conversation, RewardClient, Text, preference
from .declarations import RewardModel

BATCHES_A_ROUND = 8
"""Batches of a reward model sent to its worker together, which sorts them by length."""


class RewardModelClient(RewardClient):
    """Starts the model's worker when it is first needed, and scores what concurrent episodes ask for in batches.

    It starts in `runtime` as a worker named `name`.
    """

    def __init__(self, declared: RewardModel, name: str, runtime: Runtime, *, deterministic: bool = False) -> None:
        super().__init__()
        self._declared = declared
        self._name = name
        self._runtime = runtime
        self._deterministic = deterministic
        self._starting: asyncio.Task[WorkerHandle] | None = None
        self._batcher: Batcher[Text, Assessment] = Batcher(
            self._send, size=BATCHES_A_ROUND * declared.batch_size, key=repr
        )

    async def assess(self, conversation: Conversation, *, label: Any = None) -> Assessment:
        text = conversation if isinstance(conversation, str) else [m.as_dict() for m in as_messages(conversation)]
        return await self._at_home(self._batcher.submit(text))

    async def start(self) -> None:
        await self._at_home(self._worker())

    async def close(self) -> None:
        await self._batcher.close()
        if self._starting is not None:
            self._starting.cancel()
            [worker] = await asyncio.gather(self._starting, return_exceptions=True)
            if not isinstance(worker, BaseException):
                await worker.close()

    async def _worker(self) -> WorkerHandle:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> WorkerHandle:
        declared = self._declared
        arguments = {
            **declared.model_dump(exclude={"too_long", "timeout"}),
            "cut": declared.too_long == "cut",
            "deterministic": self._deterministic,
        }
        # Sampling waits for rewards, so each may use every core.
        environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))}
        target = "envgym.services.reward_worker:RewardWorker"
        return await self._runtime.start(target, arguments, name=self._name, environ=environ)

    async def _send(self, texts: list[Text]) -> list[Assessment | Exception]:
        worker = await self._worker()
        self.counters["requests"] += len(texts)
        self.counters["rounds"] += 1
        try:
            async with asyncio.timeout(self._declared.timeout):
                scored = await worker.call("score", texts)
        except WorkerDied:
            raise  # the run cannot go on without it
        except TimeoutError:
            self.counters["failures"] += len(texts)
            seconds = self._declared.timeout
            raise InvalidOutcome(
                "service", f"reward model {self._declared.model} took longer than {seconds:g} s", retryable=True
            ) from None
        except WorkerError as error:
            self.counters["failures"] += len(texts)
            raise InvalidOutcome("service", str(error), retryable=True) from None
        return [self._assessment(*result) for result in scored]

    def _assessment(self, reward: float | None, tokens: int, cut: bool) -> Assessment | Exception:
        where = f"reward model {self._declared.model}"
        if reward is None and not tokens:
            return InvalidOutcome("service", f"{where}: there is nothing to score, the text is empty")
        if reward is None:
            return InvalidOutcome(
                "too_long",
                f"{where}: {tokens} tokens are more than it can score: raise max_length, lower rollout.max_tokens, or "
                "let it lose the beginning with too_long=cut",
            )
        if not math.isfinite(reward):
            return InvalidOutcome("service", f"{where} gives {reward}")
        self.counters["cut"] += cut
        metrics = {"cut": float(cut)} if self._declared.too_long == "cut" else {}
        return Assessment(reward, preference(reward), metrics)
