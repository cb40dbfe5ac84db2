"""NeMo-Gym: its environments in ours (here), its agents with our policy (`agent`), ours in it (`serve`).

An episode is a session with one of its resources servers, over its own HTTP flow; nothing of NeMo-Gym is imported. Two
flows are spoken. With `tools` a session is seeded with the row, each call of the policy goes to the tool's route, and
the whole conversation is verified at the end. With `gymnasium` the server is reset with the row and steps with each
response of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
from pydantic import Field, model_validator

from envgym.env import Env, Info, StepResult
from envgym.errors import ConfigError
from envgym.tasks import DataEnvConfig, DataEnvSpec, Form
from envgym.types import Action, Task

from .flows import Flow, GymnasiumFlow, ToolsFlow, form
from .protocol import PARAMS, FlowName, Session, connector, find_resources_server, flow_of


class NemoGymConfig(DataEnvConfig):
    """Settings of the environment. `data.path` is a file of NeMo-Gym's rows."""

    url: str | None = None
    """URL of the resources server."""
    head: str | None = None
    """URL of a head server, which knows the resources servers by name: in place of `url`."""
    server: str | None = None
    """Name of the resources server at the head server. Unset: the only one there."""
    flow: Literal["auto", "tools", "gymnasium"] = "auto"
    """The flow that is spoken. `auto`: the one that the server has routes for; where it has both, `tools`."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy; then the episode is verified as it stands, and ends truncated."""
    max_result_chars: int = Field(8000, ge=1)
    """Characters of a tool's result that the policy is shown."""
    request_timeout: float = Field(60.0, gt=0)
    """Seconds the server may take for one request; then the episode fails (`server_timeout`)."""
    call_timeout: float = Field(600.0, gt=0)
    """Seconds a whole turn may take, all its tool calls together."""

    @model_validator(mode="after")
    def _check(self) -> NemoGymConfig:
        if self.url and self.head:
            raise ValueError("give url or head, not both")
        if self.server and not self.head:
            raise ValueError("server is a name at a head server: give head as well")
        return self


class NemoGymEnv(Env):
    """One session. The reward is the server's; without one the episode fails."""

    spec: NemoGym
    task: Task

    def __init__(self) -> None:
        self._flow: Flow | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self.close()
        self.task = (options or {})["task"]
        self._flow = self.spec.flow(self.task)
        return await self._flow.begin(), {}

    async def step(self, action: Action) -> StepResult:
        assert self._flow is not None, "reset comes before step"
        return await self._flow.step(action)

    async def close(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            await flow.close()


class NemoGym(DataEnvSpec):
    """The rows, the server's address and the connections to it."""

    env_class = NemoGymEnv
    agent = "tool_calling"
    Config = NemoGymConfig
    config: NemoGymConfig
    answer_required = False

    _connections: aiohttp.TCPConnector | None = None
    _url = ""
    _flow: FlowName = "tools"

    async def setup(self) -> None:
        config = self.config
        if not (config.url or config.head):
            raise ConfigError(f"environment {self.id}: which server? set env.url, or env.head and env.server")
        await super().setup()
        self._connections = connector()
        try:
            async with aiohttp.ClientSession(connector=self._connections, connector_owner=False) as http:
                self._url = config.url or await find_resources_server(str(config.head), config.server, http)
                self._flow = await flow_of(self._url, http, None if config.flow == "auto" else config.flow)
        except BaseException:
            await self.teardown()
            raise

    async def teardown(self) -> None:
        if self._connections is not None:
            await self._connections.close()
            self._connections = None
        await super().teardown()

    def form(self) -> Form:
        return form

    def flow(self, task: Task) -> Flow:
        """A new session for `task`, in the server's flow."""
        assert self._connections is not None, "setup comes first"
        if PARAMS not in task.fields:
            raise ConfigError(f"environment {self.id}: task {task.id} is no row of NeMo-Gym")
        session = Session(self._url, self._connections, self.config.request_timeout)
        flow = ToolsFlow if self._flow == "tools" else GymnasiumFlow
        return flow(session, task, max_turns=self.config.max_turns, max_chars=self.config.max_result_chars)
