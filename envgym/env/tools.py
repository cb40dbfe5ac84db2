"""The base class of environments with tools."""

from __future__ import annotations

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from envgym.errors import ConfigError
from envgym.tools import McpServer, McpSession, Tool, ToolBox
from envgym.types import Action, Message, Observation, Reward, as_messages

from .protocol import Env, EnvConfig, Info, StepResult
from .spec import EnvSpec


class ToolEnvConfig(EnvConfig):
    """Settings of environments with tools."""

    max_calls: int = Field(16, ge=1)
    """Maximum number of tool calls in one episode; a turn that exceeds it truncates the episode."""
    tool_timeout: float = Field(30.0, gt=0)
    """Seconds a call may take, for tools without their own deadline."""
    max_result_chars: int = Field(8000, ge=1)
    """Maximum length of a result that the policy reads, in characters."""
    result_images: bool = True
    """Show the policy the images in results. False, for a policy of text alone: `[image 64 x 48]` stands for one."""


class ToolEnvSpec(EnvSpec):
    """The spec of environments with tools."""

    Config: ClassVar[type[EnvConfig]] = ToolEnvConfig
    agent = "tool_calling"


class ToolEnv(Env):
    """Offers tools, runs the calls of each turn, and grades the first turn without a call.

    Subclass it and write `tools` and `grade`, and `begin` unless the first observation is the task's prompt. They may
    be plain functions that do not block, or coroutine functions. An override of `close` calls this one.
    """

    spec_class = ToolEnvSpec
    toolbox: ToolBox

    _sessions: Sequence[McpSession] = ()

    def begin(self) -> Any:
        """Start an episode of `self.task`: the first observation, text or messages."""
        return self.task.prompt

    @abstractmethod
    def tools(self) -> Any:
        """The tools of this episode: functions (methods of this instance share its state), `Tool`s, `McpServer`s.

        A server gets a separate session per episode; to share a session, return its `tools`.
        """

    @abstractmethod
    def grade(self, action: Action) -> Any:
        """The reward of the final answer: a number, or a `Reward` with score and metrics."""

    def answer(self, action: Action) -> str | None:
        """The final answer as text; majority votes count equal texts as equal answers."""
        return action.text.strip() or None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self._end_sessions()
        messages = as_messages(await _resolve(self.begin()))
        config = self.config
        if not isinstance(config, ToolEnvConfig):
            raise ConfigError(f"environment {self.spec.id}: its Config must be a subclass of ToolEnvConfig")
        if not callable(self.tools):
            raise ConfigError(f"environment {self.spec.id}: tools is a method that returns them: def tools(self): …")
        tools = await self._open(await _resolve(self.tools()))
        self.toolbox = ToolBox(
            tools, timeout=config.tool_timeout, max_chars=config.max_result_chars, with_images=config.result_images
        )
        self._calls_left = config.max_calls
        return Observation(messages=messages, tools=self.toolbox.specs), {}

    async def step(self, action: Action) -> StepResult:
        if not action.tool_calls:
            return await self._end(action)
        self._calls_left -= len(action.tool_calls)
        if self._calls_left < 0:
            return (), 0.0, False, True, {"metrics": self.toolbox.metrics}
        results: Sequence[Message] = await self.toolbox.call(action.tool_calls)
        return results, 0.0, False, False, {"metrics": self.toolbox.metrics}

    async def close(self) -> None:
        await self._end_sessions()

    async def _end(self, action: Action) -> StepResult:
        graded = await _resolve(self.grade(action))
        reward = graded if isinstance(graded, Reward) else Reward(graded)
        info: Info = {"answer": self.answer(action), "metrics": self.toolbox.metrics | dict(reward.metrics)}
        if reward.score is not None:
            info["score"] = reward.score
        return (), reward.reward, True, False, info

    async def _open(self, offered: Sequence[Any]) -> list[Tool | Callable[..., Any]]:
        """Start sessions with the servers among the tools; they are closed with the environment."""
        self._sessions = sessions = [item.session() for item in offered if isinstance(item, McpServer)]
        await asyncio.gather(*(session.start() for session in sessions))
        started = iter(sessions)
        tools: list[Tool | Callable[..., Any]] = []
        for item in offered:
            tools += next(started).tools if isinstance(item, McpServer) else [item]
        return tools

    async def _end_sessions(self) -> None:
        sessions, self._sessions = self._sessions, []
        await asyncio.gather(*(session.close() for session in sessions))


async def _resolve(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
