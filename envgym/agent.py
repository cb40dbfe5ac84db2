"""The agent's interface: it turns a policy into actions, tokens in and tokens out, and records what happened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from envgym.engine import ChatReply, Generation, SamplingParams

from .env import CheckedEnv
from .render import Renderer
from .settings import Settings
from .types import Episode, Limit, Message, Task, ToolSpec


class OutOfBudget(Exception):
    """The episode may sample no more; `reason` is the limit that was reached."""

    def __init__(self, reason: Limit) -> None:
        super().__init__(reason)
        self.reason = reason


class Sampler(Protocol):
    """An engine bound to one episode: it knows the episode's sampling defaults, seed and request ids."""

    @property
    def sampling(self) -> SamplingParams:
        """The run's sampling parameters for one turn."""

    @property
    def max_model_len(self) -> int:
        """The engine's context length in tokens."""

    def limit(self, max_tokens: int | None) -> None:
        """Let the episode sample no more than so many tokens in all; None: any number."""

    async def generate(self, token_ids: Sequence[int], overrides: Mapping[str, Any] | None = None) -> Generation:
        """Sample one turn after `token_ids` [T], which must not change meanwhile: an int32 array is not copied. Each
        call is the episode's next turn; `overrides` replace fields of the sampling parameters for this turn alone.

        The turn is cut to what the context and the episode's limit leave. Raises `PromptTooLong` where nothing more
        fits into the context, and `OutOfBudget` where the limit is used up."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), overrides: Mapping[str, Any] | None = None
    ) -> ChatReply:
        """The same for an engine that takes messages: what the assistant says after `messages`."""


class AgentConfig(Settings):
    """Base class of an agent's settings. Unknown keys are refused."""


class Agent(ABC):
    """Plays one episode at a time; one agent plays many at once, so it keeps no state between calls.

    `run` returns what happened with `outcome`, `rows`, `reward`, `score` and `messages` filled in; the runner
    adds ids, groups and times. Exceptions of the environment or the engine may pass through: the runner
    turns them into a failed episode.
    """

    Config: ClassVar[type[AgentConfig]] = AgentConfig
    uses_policy: ClassVar[bool] = True
    """False for agents that replay recorded answers: no engine is started for them."""
    speaks: ClassVar[Literal["tokens", "messages"]] = "tokens"
    """The form of its requests to an engine: tokens (`generate`), or messages (`chat`), which every API takes."""
    by_messages: ClassVar[Mapping[str, Any] | None] = None
    """Name and settings of the agent that plays the same way by messages, its own settings kept beside these. Not
    inherited: a subclass may play otherwise."""

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        self.renderer = renderer
        self.config = config

    @abstractmethod
    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode: ...

    async def replay(self, env: CheckedEnv, task: Task, *, seed: int, member: int) -> Episode:
        """Play recording `member` of a task: what agents that do not use the policy are asked for."""
        return await self.run(env, task, None, seed=seed)
