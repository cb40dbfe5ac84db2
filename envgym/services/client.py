"""The clients that environments get for their declared services."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from envgym.errors import ConfigError
from envgym.processes.event_loop import in_loop
from envgym.types import Message

T = TypeVar("T")
Conversation = str | Sequence[Message | Mapping[str, Any]]
"""Plain text, or chat messages."""
Text = str | list[dict[str, Any]] | dict[str, Any]
"""A conversation as plain text or as chat templates take it; or an answer in steps: the messages `before` it, its first
`steps`, and `is_last`, whether they complete it."""
Scored = tuple[float | None, int, bool] | str
"""A reward model's (reward, number of tokens, whether it was truncated) for a conversation; or the reason why it cannot
be rendered."""


class Client:
    """Base of the clients. Make one inside the event loop of the run.

    Calls may come from any event loop or thread: a blocking environment, which has its own thread, writes
    `asyncio.run(client.complete(…))`. `counters` counts requests, retries, failures and the like.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._home_loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Start the service before the first call, whose deadline would otherwise include the start."""

    async def close(self) -> None:
        """Release the service. Safe to call twice."""

    async def _in_home_loop(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call` in the event loop that the client belongs to."""
        return await in_loop(self._home_loop, call)


@dataclass(frozen=True, slots=True)
class Assessment:
    """A reward service's answer to a conversation: a reward, a score in [0, 1] if it gave one, and numbers to report.

    A reward model's score is `preference(reward)`.
    """

    reward: float
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def preference(reward: float) -> float:
    """The probability, by a reward model trained on preferences, that an answer with this reward is preferred to one
    with reward 0: the logistic function, of Bradley and Terry's model (1952)."""
    return 0.5 * (1.0 + math.tanh(0.5 * reward))  # does not overflow


class RewardClient(Client, ABC):
    """Scores conversations, those of concurrent episodes in batches."""

    @abstractmethod
    async def assess(self, conversation: Conversation, *, label: Any = None) -> Assessment:
        """Score the last message of a conversation. `label` is the reference answer, for services that compare with it.

        Raises `InvalidOutcome` where there is no reward: the episode then fails, and does not get reward 0.
        """

    async def assess_step(self, prompt: Conversation, steps: Sequence[str], *, is_last: bool) -> float:
        """The probability that the last of an answer's `steps` is right. Process reward models only."""
        raise ConfigError("this reward service scores complete answers: steps need a process reward model")

    async def score_one(self, conversation: Conversation) -> float:
        """The reward of one conversation."""
        return (await self.assess(conversation)).reward


class ChatClient(Client, ABC):
    """Answers conversations."""

    @abstractmethod
    async def complete(
        self, messages: Conversation, *, max_tokens: int = 512, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        """The assistant's next message. Raises `InvalidOutcome` where there is none.

        Give a seed from the environment (`self.rng.getrandbits(31)`) to make sampled answers the same in every
        deterministic run.
        """
