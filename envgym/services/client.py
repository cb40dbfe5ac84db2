"""The clients that environments are handed for the services they declared."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from envgym.errors import ConfigError
from envgym.types import Message

T = TypeVar("T")
Conversation = str | Sequence[Message | Mapping[str, Any]]
"""Plain text, or chat messages."""
Text = str | list[dict[str, Any]] | dict[str, Any]
"""A conversation as plain text or in the form that chat templates take; or an answer in steps: the messages `before`
it, its `steps` so far, and `is_last`, whether it ends with them."""


class Client:
    """Base of the clients. Make one inside the event loop of the run.

    Calls may come from any event loop or thread: a blocking environment, which has a thread of its own, writes
    `asyncio.run(client.complete(…))`. `counters` counts requests, retries, failures and the like.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._home = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start what the service needs. Calls do this too; asked for early, it is in nobody's deadline."""

    async def close(self) -> None:
        """Release it. Safe to call twice."""

    async def _at_home(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call` in the event loop that the client belongs to."""
        if asyncio.get_running_loop() is self._home:
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))


@dataclass(frozen=True, slots=True)
class Assessment:
    """A reward service's answer to a conversation: a reward; a score in [0, 1] where it gave one; numbers to report.

    A reward model's score is `preference(reward)`.
    """

    reward: float
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def preference(reward: float) -> float:
    """The probability, as a reward model trained on preferences sees it, that an answer with this reward is preferred
    to one with reward 0: the logistic function, of Bradley and Terry's model (1952)."""
    return 0.5 * (1.0 + math.tanh(0.5 * reward))  # does not overflow


class RewardClient(Client, ABC):
    """Scores conversations; those that concurrent episodes ask about are scored together."""

    @abstractmethod
    async def assess(self, conversation: Conversation, *, label: Any = None) -> Assessment:
        """Judge the last message of a conversation. `label` is the task's answer, for services that compare with it.

        Raises `InvalidOutcome` where no reward can be had: the episode then fails, it is not worth zero.
        """

    async def assess_step(self, prompt: Conversation, steps: Sequence[str], *, is_last: bool) -> float:
        """The probability of the last of an answer's steps so far being right. Only process reward models say."""
        raise ConfigError("this reward service judges whole answers: steps want a process reward model, here")

    async def score_one(self, conversation: Conversation) -> float:
        """The reward of one conversation."""
        return (await self.assess(conversation)).reward


class ChatClient(Client, ABC):
    """Answers conversations."""

    @abstractmethod
    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        """The assistant's next message. Raises `InvalidOutcome` where none can be had.

        Give a seed of the environment's own (`self.rng.getrandbits(31)`) where an answer that is sampled should be
        the same again in a deterministic run.
        """
