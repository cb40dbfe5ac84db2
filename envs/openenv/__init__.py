"""OpenEnv: its servers' environments in envgym (`openenv:URL`), and envgym's environments served to its clients
(`serve`) and written as its projects (`export`).

An episode is a session over OpenEnv's WebSocket; nothing of OpenEnv is imported. The schema of the server's actions
decides how the policy acts: with a text where an action has one field, else with tool calls.
"""

from __future__ import annotations

import functools
import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import InvalidOutcome
from envgym.hashing import text_hash
from envgym.net.tokens import read_token
from envgym.remote.access import parse_address
from envgym.remote.transport import RemoteError
from envgym.tasks import Form, SeededTasks, TaskSet
from envgym.tools import Tool, ToolBox
from envgym.tools.schema import WrongArguments
from envgym.tools.tool import ToolFailure
from envgym.types import Action, Message, Observation, ToolSpec

from .actions import ActionForm, form_of, text_of
from .protocol import Answer, OpenEnvServer, ServerRefusal, Session


class OpenEnvConfig(DataEnvConfig):
    """Settings of the connection and of the policy's view. The rows of `data` are arguments of `reset`."""

    show: str | None = None
    """The part of an observation that the policy reads: a field, or `field.key`. Unset: its only field if that is a
    text, else all fields as JSON, without the metadata."""
    instruction: str = ""
    """Text of a system message at the start of each episode, such as the rules of a game."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of every `reset`, beside the seed and the episode's id."""
    execution_error: Literal["fail", "observation"] = "fail"
    """`fail`: an error of the environment makes the episode fail (`server_error`). `observation`: the policy reads it,
    for servers that reject a wrong action in this way."""
    token_file: Path | None = None
    """File with the server's token, which other users must not be able to read. Only its path is saved."""
    reconnect: float = Field(30.0, ge=0)
    """Seconds of retries at an unreachable server before the episode fails (`connection`)."""
    wait: float = Field(600.0, gt=0)
    """Seconds to wait for a place at a full server before the episode fails (`capacity`)."""


class OpenEnvEnv(Env):
    """A session at the server, reset for each episode. The reward of a reset does not count."""

    spec: OpenEnvSpec
    config: OpenEnvConfig

    _session: Session | None = None
    _toolbox: ToolBox | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await super().reset(seed=seed)
        seed = self.rng.getrandbits(31) if seed is None else seed
        if self._session is not None and not self._session.is_usable:
            await self.close()
        if self._session is None:
            self._session = await self.spec.server.open()
        data = {**self.config.reset, **self.task.fields, "seed": seed, "episode_id": uuid.uuid4().hex}
        try:
            answer = await self._session.ask("reset", data)
        except ServerRefusal as refusal:
            raise self._failure("reset", refusal) from None
        if answer.get("done") is True:
            raise RemoteError("server", f"{self.spec.url}: the episode is done after reset")
        self._rewards: list[float] = []
        self._is_done = self._is_truncated = False
        self._metrics: dict[str, float] = {}
        first = Message("user", text_of(answer["observation"], self.config.show))
        messages = [Message("system", self.config.instruction), first] if self.config.instruction else [first]
        if self.spec.actions.field:
            return Observation(messages), {}
        tools = [Tool(tool, functools.partial(self._call, tool.name)) for tool in await self._list_tools()]
        self._toolbox = ToolBox(tools, timeout=math.inf)  # the limit of the whole step, `env.call_timeout`, holds
        return Observation(messages, tools=self._toolbox.specs), {}

    async def _list_tools(self) -> list[ToolSpec]:
        """The tools of this episode. Raises `RemoteError` if the server lists none."""
        if self.spec.actions.act is not None:
            return [self.spec.actions.act]
        answer = await self._take_step({"type": "list_tools"})
        tools = [
            tool
            for tool in answer.get("tools") or ()
            if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
        ]
        if not tools:
            raise RemoteError("server", f"{self.spec.url} lists no tools")
        schema = {"type": "object", "properties": {}}
        return [ToolSpec(t["name"], t.get("description") or "", t.get("input_schema") or schema) for t in tools]

    async def step(self, action: Action) -> StepResult:
        self._rewards.clear()
        messages: list[Message] = []
        if self._toolbox is None:
            try:
                observation = await self._take_step(self.spec.actions.of_text(action.text))
                messages.append(Message("user", text_of(observation, self.config.show)))
            except ServerRefusal as refusal:
                messages.append(Message("user", f"Error: {refusal}"))
        else:
            for call in action.tool_calls:  # in their order, each a step
                if not self._is_done:
                    messages += await self._toolbox.call([call])
            self._metrics = {**self._toolbox.metrics, **self._metrics}  # the server's own come first
            self._is_truncated |= not action.tool_calls  # a turn without a call says nothing to the server
        reward = sum(self._rewards) if self._rewards else None
        is_terminated = self._is_done and not self._is_truncated
        return messages, reward, is_terminated, self._is_truncated, {"metrics": self._metrics}

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool, for the policy."""
        try:
            observation = await self._take_step(self.spec.actions.of_call(name, arguments))
        except ServerRefusal as refusal:
            raise WrongArguments(str(refusal)) from None
        text, result = text_of(observation, self.config.show), observation.get("result")
        if observation.get("error") or (isinstance(result, Mapping) and result.get("is_error")):
            raise ToolFailure(text)
        return text

    async def _take_step(self, data: Answer) -> Mapping[str, Any]:
        """Take a step, and return its observation. Raises `ServerRefusal` where the policy is told why there was
        none."""
        assert self._session is not None, "reset comes before step"
        try:
            answer = await self._session.ask("step", data)
        except ServerRefusal as refusal:
            is_shown = refusal.code == "EXECUTION_ERROR" and self.config.execution_error == "observation"
            if refusal.code != "VALIDATION_ERROR" and not is_shown:
                raise self._failure("step", refusal) from None
            raise
        observation: Mapping[str, Any] = answer["observation"]
        if answer.get("reward") is not None:
            self._rewards.append(answer["reward"])
        self._is_done |= answer.get("done") is True
        metadata = observation.get("metadata")
        if isinstance(metadata, Mapping):
            self._is_truncated |= metadata.get("truncated") is True
            numbers = {name: float(number) for name, number in metadata.items() if isinstance(number, int | float)}
            self._metrics |= {name: number for name, number in numbers.items() if math.isfinite(number)}
        return observation

    def _failure(self, kind: str, refusal: ServerRefusal) -> InvalidOutcome:
        return InvalidOutcome("server_error", f"{self.spec.url}: {kind} failed ({refusal.code}): {refusal}")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self.spec.server.leave(session)


class OpenEnvSpec(DataEnvSpec):
    """The server's address, its actions, and the sessions at it."""

    env_class = OpenEnvEnv
    agent = "tool_calling"  # without tools this is `multi_turn`
    Config = OpenEnvConfig
    config: OpenEnvConfig
    answer_required = False

    server: OpenEnvServer
    actions: ActionForm
    _metadata: Mapping[str, Any] | None = None

    def __init__(self, id: str, **kwargs: Any) -> None:
        super().__init__(id, **kwargs)
        self.url = str(parse_address(id.removeprefix("openenv:").rstrip("/")))

    async def setup(self) -> None:
        """Ask the server for its actions. Raises `ConfigError` if there is no OpenEnv server."""
        await super().setup()
        config = self.config
        secret = read_token(config.token_file) if config.token_file else ""
        self.server = OpenEnvServer(self.url, secret, wait=config.wait, reconnect=config.reconnect)
        self.closing.push_async_callback(self.server.close)
        schema = await self.server.fetch("/schema")
        self.actions = form_of(schema.get("action"), self.url)
        metadata = await self.server.fetch("/metadata")
        self._metadata = {name: metadata.get(name) for name in ("name", "description")} | {"schema": schema}

    def form(self) -> Form:
        return lambda row, context: {**row, "prompt": ""}

    def default_tasks(self, split: str) -> TaskSet:
        return SeededTasks(split)

    def fingerprint(self) -> dict[str, str]:
        """With the server's description of its environment, once it is known."""
        server = {"server": text_hash(json.dumps(self._metadata, sort_keys=True))} if self._metadata else {}
        return {**super().fingerprint(), **server}

    @property
    def summary(self) -> str:
        return str((self._metadata or {}).get("description") or f"The environment of OpenEnv's server at {self.url}")
