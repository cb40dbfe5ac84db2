"""A file that defines `AgentInstance` and `AgentExecutor` as a multi-turn environment."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envgym.env import Env, Info, StepResult
from envgym.env.rewards import prompt_text
from envgym.errors import EnvgymError
from envgym.isolation.processes import Session
from envgym.types import Action, Message, Observation, Task, as_messages

from .foreign_file import ForeignFile, ForeignFileConfig

Sample = Callable[[list[int], Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]]
"""Samples after these tokens, with sampling parameters changed: token ids, log-probabilities and finish reason, or None
where there is no room for more."""
DEFAULT_SAMPLING = {"max_tokens": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": (), "seed": None}
"""What an agent is told the sampling parameters are by those who do not tell it the run's."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What an agent file is told of the policy: its tokenizer, sampling parameters, context length and most turns."""

    tokenizer: Any = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_SAMPLING)
    max_length: int | None = None
    max_steps: int | None = None


class AgentFileConfig(ForeignFileConfig):
    """Settings of an agent from a file for OpenRLHF."""

    chat: bool = False
    """Pose the first observation as chat messages, through the model's template. What the agent says later is appended
    as raw text either way: it writes its own markup."""


class AgentEnv(Env):
    """One episode: an `AgentInstance` of the file, in one of its processes."""

    spec: AgentFile
    task: Task

    def __init__(self) -> None:
        self.policy = Policy()
        """Whoever plays may tell before `reset`."""
        self.score: float | None = None
        """The last score that the agent gave, None where that was none in [0, 1]."""
        self._session: Session | None = None
        self._key = uuid.uuid4().hex

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        self.task, self.score = (options or {})["task"], None
        *before, last = as_messages(self.task.prompt)
        if self.spec.executes and self.policy.tokenizer is not None:  # `execute` comes next
            return self._posed(before, last.role, last.text), {}
        session = await self._open()
        prompt = last.text if self._is_chat else prompt_text(self.task)
        text = await session.call("reset", self._key, prompt, self.task.answer, dict(self.policy.sampling))
        return self._posed(before, last.role, text), {}

    async def step(self, action: Action) -> StepResult:
        assert self._session is not None
        said, metrics, sampling = await self._session.call("step", self._key, action.text)
        self.score = said.score
        observation = Observation(text=said.feedback, sampling=sampling)
        return observation, said.reward, said.done, False, {"score": said.score, "metrics": metrics}

    async def execute(self, sample: Sample) -> dict[str, Any]:
        """Let the file's own `execute` play the episode after `reset`, and return what it returned, as plain numbers
        (see `host.read_result`)."""
        session = await self._open()
        async with self.spec.teaching:  # it is large, and once for each process is enough
            if not await session.call("knows_tokenizer"):
                await session.call("learn_tokenizer", self.policy.tokenizer)
        prompt: str | list[dict[str, Any]] = prompt_text(self.task)
        if self._is_chat:
            prompt = [message.as_dict() for message in as_messages(self.task.prompt)]
        policy = {
            "sampling": dict(self.policy.sampling),
            "max_length": self.policy.max_length,
            "max_steps": self.policy.max_steps,
        }
        await session.call("begin", self._key, prompt, self.task.answer, policy)
        while True:
            kind, value = await session.call("next", self._key)
            if kind == "result":
                return dict(value)
            number, token_ids, sampling = value
            await session.call("answer", self._key, number, await sample(token_ids, sampling))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if session.alive:
                with contextlib.suppress(EnvgymError):
                    await session.call("close_episode", self._key)
        finally:
            session.end()

    @property
    def _is_chat(self) -> bool:
        return self.spec.config.chat or not isinstance(self.task.prompt, str)

    def _posed(self, before: list[Message], role: str, text: str) -> Observation:
        if self._is_chat:
            return Observation(messages=(*before, Message.of(role, text)))
        return Observation(text=text)

    async def _open(self) -> Session:
        if self._session is None or not self._session.alive:
            if self._session is not None:
                self._session.end()
            self._session = await self.spec.processes.session()
        return self._session


class AgentFile(ForeignFile):
    """The environment of such a file.

    Where its executor leaves `execute` as it is, this is an environment like others, with `reset` and `step`. Else
    the file drives the model itself, which takes the agent it names; others leave its `execute` out.
    """

    agent = "openrlhf_executor"
    env = AgentEnv
    Config = AgentFileConfig
    config: AgentFileConfig
    host = "envgym.envs.openrlhf.host:AgentHost"

    executes = False
    """Whether the file has an `execute` of its own; known once it is set up."""

    async def setup(self) -> None:
        await super().setup()
        self.teaching = asyncio.Lock()
        session = await self.processes.session()
        try:
            self.executes = await session.call("executes")
        finally:
            session.end()
