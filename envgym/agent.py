"""The agent's interface: an agent turns a policy into actions, tokens in and tokens out, and records the episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from envgym.engine import ChatReply, Generation, SamplingParams

from .env import CheckedEnv
from .render import Renderer
from .settings import Settings
from .types import Episode, Limit, Message, Outcome, PlacedImage, Task, ToolSpec


class OutOfBudget(Exception):
    """The episode has reached a sampling limit, `reason`."""

    def __init__(self, reason: Limit) -> None:
        super().__init__(reason)
        self.reason = reason


class Sampler(Protocol):
    """An engine bound to one episode, with the episode's sampling defaults, seed and request ids."""

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling parameters for one turn."""

    @property
    def max_model_len(self) -> int:
        """The engine's context length in tokens."""

    record: Callable[[Task, Outcome], Episode] | None
    """Makes the episode of what is recorded so far. The runner calls it for an episode that fails; a `Transcript` sets
    it."""

    def limit(self, max_tokens: int | None) -> None:
        """Limit the tokens that the episode may sample in all; None: no limit."""

    async def generate(
        self, token_ids: Sequence[int], overrides: Mapping[str, Any] | None = None, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample one turn after `token_ids` [T], which must not change during the call: an int32 array is not copied.
        Each call is the episode's next turn; `overrides` replace fields of the sampling parameters for this turn only.
        `images` are those among the tokens, in order.

        The turn is truncated at the context length and at the episode's limit. Raises `PromptTooLong` if the context is
        full, and `OutOfBudget` if the limit is used up."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), overrides: Mapping[str, Any] | None = None
    ) -> ChatReply:
        """Generate the assistant's reply to `messages`: `generate` for engines that take messages."""


class AgentConfig(Settings):
    """Base class of an agent's settings. Unknown keys raise an error."""


class Agent(ABC):
    """Runs episodes. Each call of `run` runs one episode; calls are concurrent: keep no state on `self`.

    `run` returns an episode with `task`, `outcome`, `rows`, `reward`, `score`, `answer`, `metrics` and `messages`; the
    runner adds ids, group, seed and times. Exceptions of the environment or the engine may pass through: the runner
    turns them into a failed episode. The types in these signatures are in `envgym.agent` and `envgym.types`.
    """

    Config: ClassVar[type[AgentConfig]] = AgentConfig
    uses_policy: ClassVar[bool] = True
    """False for agents that replay recorded answers and need no engine."""
    interface: ClassVar[Literal["tokens", "messages"]] = "tokens"
    """The engine interface that the agent uses: tokens (`generate`), or messages (`chat`), which every API has."""
    chat_agent: ClassVar[str | None] = None
    """Name of the agent that does the same by messages, with the same settings, for API engines. Not inherited by
    subclasses, whose episodes may differ."""

    steps_are_turns: ClassVar[bool] = True
    """True if the environment's steps get the policy's recorded turns, one after the other."""

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        self.renderer = renderer
        self.config = config

    @abstractmethod
    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode: ...

    async def replay(self, env: CheckedEnv, task: Task, *, seed: int, recording_index: int) -> Episode:
        """Replay one recording of a task. The runner calls this, not `run`, if `uses_policy` is False."""
        return await self.run(env, task, None, seed=seed)
