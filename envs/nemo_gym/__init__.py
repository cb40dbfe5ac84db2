"""NeMo-Gym: its environments in envgym (here), its agents with our policy (`agent`), our environments in it (`serve`).

An episode is a session with one of its resources servers, over NeMo-Gym's HTTP protocol; nothing of NeMo-Gym is
imported. There are two flows. With `tools`, a session is seeded with the row, each call of the policy goes to the
tool's route, and the whole conversation is verified at the end. With `gymnasium`, the server is reset with the row and
takes a step with each response of the policy.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from envgym.agents.external import responses_api
from envgym.env import Env, Info, StepResult
from envgym.env.data import DataEnvConfig, DataEnvSpec
from envgym.errors import ConfigError, DataError, InvalidOutcome, did_you_mean
from envgym.tasks import Form
from envgym.types import Action, Message, Observation, StopReason, Task, ToolCall, as_messages

from .protocol import PARAMS, FlowName, check_valid, number, numbers

if TYPE_CHECKING:
    from envgym.net.client import HttpClient

    from . import client

RESERVED_ROUTES = {"seed_session", "verify", "reset", "step", "close", "close_session", "aggregate_metrics"}
"""Routes of the server itself, never a tool's."""
EXCLUDED = {"reward", "mask_sample", "terminated", "truncated", "supports_explicit_close", "supports_step_idempotency"}
"""Fields of an answer that are no metrics."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


class NemoGymConfig(DataEnvConfig):
    """Settings of the environment. `data.path` is a file of NeMo-Gym's rows."""

    url: str | None = None
    """URL of the resources server."""
    head: str | None = None
    """URL of a head server, which has the resources servers' addresses by name: in place of `url`."""
    server: str | None = None
    """Name of the resources server at the head server. Unset: the only one there."""
    flow: Literal["auto", "tools", "gymnasium"] = "auto"
    """The flow to use. `auto`: the flow whose routes the server has; if it has both, `tools`."""
    max_turns: int = Field(16, ge=1)
    """Maximum turns of the policy; then the unfinished episode is verified, and ends truncated."""
    max_result_chars: int = Field(8000, ge=1)
    """Maximum characters of a tool's result in the observation."""
    request_timeout: float = Field(60.0, gt=0)
    """Seconds per request to the server; then the episode fails (`server_timeout`)."""
    call_timeout: float = Field(600.0, gt=0)
    """Seconds per turn, all its tool calls together."""

    @model_validator(mode="after")
    def _check(self) -> NemoGymConfig:
        if self.url and self.head:
            raise ValueError("give url or head, not both")
        if self.server and not self.head:
            raise ValueError("env.server names a server of a head server: set env.head to its address as well")
        return self


class NemoGymEnv(Env):
    """One session with a server of NeMo-Gym. The server's reward is the episode's; without one the episode fails."""

    spec: NemoGym

    _flow: Flow | None = None

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        await self.close()
        self._flow = self.spec.flow(self.task)
        return await self._flow.reset(), {}

    async def step(self, action: Action) -> StepResult:
        assert self._flow is not None, "reset comes before step"
        return await self._flow.step(action)

    async def close(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            async with flow.session.http:  # which closes it
                await flow.close()


class NemoGym(DataEnvSpec):
    """The rows, the server's address and the connections to it."""

    env_class = NemoGymEnv
    agent = "tool_calling"
    Config = NemoGymConfig
    config: NemoGymConfig
    answer_required = False

    _http: HttpClient
    _url = ""
    _flow: FlowName = "tools"

    async def setup(self) -> None:
        config = self.config
        if not (config.url or config.head):
            raise ConfigError(f"environment {self.id}: which server? set env.url, or env.head and env.server")
        from envgym.net.client import HttpClient  # which looks need not load

        from . import client

        await super().setup()
        self._http = HttpClient()
        self.closing.push_async_callback(self._http.close)
        self._url = config.url or await client.find_resources_server(str(config.head), config.server, self._http)
        self._flow = await client.flow_of(self._url, self._http, None if config.flow == "auto" else config.flow)

    def form(self) -> Form:
        return form

    def flow(self, task: Task) -> Flow:
        """A new session for `task`, in the server's flow. Raises `ConfigError` for a task that is no row of
        NeMo-Gym."""
        if PARAMS not in task.fields:
            raise ConfigError(f"environment {self.id}: task {task.id} is no row of NeMo-Gym")
        from .client import ResourcesSession

        session = ResourcesSession(self._url, self._http, self.config.request_timeout)
        flow = ToolsFlow if self._flow == "tools" else GymnasiumFlow
        return flow(session, task, max_turns=self.config.max_turns, max_chars=self.config.max_result_chars)


# -- rows and flows --------------------------------------------------------------------------------------


def form(row: dict[str, Any], context: str) -> dict[str, Any]:
    """A row of NeMo-Gym with a `prompt`: the messages of its request to the policy.

    Raises `DataError` for any other row, and for tools that cannot be called.
    """
    params = row.get(PARAMS)
    if not isinstance(params, Mapping) or "input" not in params:
        raise DataError(f"{context}: not a row of NeMo-Gym: {PARAMS}.input is missing")
    try:
        messages = responses_api.messages_of(params["input"], params.get("instructions"))
        tools = responses_api.tools_of(params.get("tools"))
    except responses_api.MalformedItem as error:
        raise DataError(f"{context}: {PARAMS}: {error}") from None
    for tool in tools:
        if not _TOOL_NAME.fullmatch(tool.name) or tool.name in RESERVED_ROUTES:
            raise DataError(f"{context}: {tool.name!r:.80} is no name of a tool: its calls would go to another route")
    return {**row, "prompt": list(messages)}


class Flow(ABC):
    """An episode with a resources server."""

    def __init__(self, session: client.ResourcesSession, task: Task, *, max_turns: int, max_chars: int) -> None:
        self.session, self.task = session, task
        self.max_turns, self.max_chars = max_turns, max_chars
        self.row = dict(task.fields)
        self.params: Mapping[str, Any] = self.row[PARAMS]
        self.tools = {tool.name: tool for tool in responses_api.tools_of(self.params.get("tools"))}
        self.turns = 0

    @abstractmethod
    async def reset(self) -> Observation:
        """Open the session and return the first observation."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Answer a turn of the policy."""

    async def close(self) -> None:
        """End the session at the server, if it supports that."""

    def opening(self, *messages: Message) -> Observation:
        return Observation((*as_messages(self.task.prompt), *messages), tools=tuple(self.tools.values()))

    def result(self, call_id: str, name: str, text: str) -> Message:
        """A tool's result as an observation of the policy."""
        if len(text) > self.max_chars:
            text = f"{text[: self.max_chars]}\n[truncated: {len(text)} characters in all]"
        return Message("tool", text, tool_call_id=call_id, name=name[:64])

    def body(self, output: list[responses_api.Item], action: Action) -> dict[str, Any]:
        """The row with the policy's turns, as the server expects it from NeMo-Gym's own agents."""
        response = responses_api.response(
            output,
            truncated=action.stop_reason is StopReason.LENGTH,
            tools=[{"strict": None, "parameters": None, **tool} for tool in self.params.get("tools") or ()],
            tool_choice=self.params.get("tool_choice") or "auto",
            parallel_tool_calls=self.params.get("parallel_tool_calls") is not False,
        )
        return {**self.row, "response": response}

    def metrics(self, answer: Mapping[str, Any]) -> dict[str, float]:
        """The numbers in an answer without the reward and the row's own fields, which servers send back."""
        components = answer.get("reward_components")
        parts = {f"reward_{name}": n for name, n in components.items()} if isinstance(components, Mapping) else {}
        return numbers({**answer, **parts}, EXCLUDED | self.row.keys())


class ToolsFlow(Flow):
    """Seed, call, verify."""

    async def reset(self) -> Observation:
        self._output: list[responses_api.Item] = []
        self._counts = {"tool_calls": 0, "tool_malformed": 0, "tool_errors": 0}
        await self.session.ask("seed_session", self.row)
        return self.opening()

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        self._output += responses_api.output_items(_message(action))
        truncated = action.stop_reason is StopReason.LENGTH
        results = [] if truncated else [await self._call_tool(call) for call in action.tool_calls]
        if results and self.turns < self.max_turns:
            return results, 0.0, False, False, {"metrics": dict(self._counts)}
        verdict = await self.session.ask("verify", self.body(self._output, action))
        reward = _reward(verdict, "verify")
        info = {"answer": action.text.strip() or None, "metrics": {**self._counts, **self.metrics(verdict)}}
        return results, reward, not results, bool(results), info

    async def _call_tool(self, call: ToolCall) -> Message:
        """Call a tool on the server and count it. Returns its result, or the error of a call that is not sent."""
        self._counts["tool_calls"] += 1
        if call.error or call.name not in self.tools:
            self._counts["tool_malformed"] += 1
            text = call.error or f"there is no tool {call.name[:60]!r}.{did_you_mean(call.name, self.tools)}"
            message = self.result(call.id, call.name, f"Error: {text}")
        else:
            status, text = await self.session.post(call.name, call.arguments)
            self._counts["tool_errors"] += status >= 400
            message = self.result(call.id, call.name, text)
        if not call.error:  # of an unreadable call the server has only the text, which takes no result
            self._output.append(responses_api.result_item(message))
        return message


class GymnasiumFlow(Flow):
    """Reset, and a step per response. The server itself calls the tools in the response."""

    _closes = _idempotent = False

    async def reset(self) -> Observation:
        answer = await self.session.ask("reset", self.row)
        info = _info(answer, "reset")
        self._closes = info.get("supports_explicit_close") is True
        self._idempotent = info.get("supports_step_idempotency") is True
        return self.opening(*_observation(answer, "reset"))

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        turn = _message(action)
        body = self.body(responses_api.output_items(turn), action)
        if self._idempotent:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        answer = await self.session.ask("step", body, repeatable=self._idempotent)
        info = _info(answer, "step")
        reward, ends = _reward(answer, "step"), answer.get("terminated") is True
        messages = [*self._tool_messages(info, turn), *_observation(answer, "step")]
        truncated = answer.get("truncated") is True or (not ends and self.turns >= self.max_turns)
        metrics = self.metrics({**info, **answer})
        return messages, reward, ends, truncated, {"answer": action.text.strip() or None, "metrics": metrics}

    def _tool_messages(self, info: Mapping[str, Any], turn: Message) -> list[Message]:
        """An error for each call that could not be read (the server got it only as text), then the results of the calls
        that the server ran. Raises `InvalidOutcome` for another form of `tool_outputs`."""
        names = {call.id: call.name for call in turn.tool_calls}
        results = [self.result(call.id, call.name, f"Error: {call.error}") for call in turn.tool_calls if call.error]
        outputs = info.get("tool_outputs") or []
        for output in outputs if isinstance(outputs, list) else [repr(outputs)]:
            if not isinstance(output, Mapping) or not isinstance(output.get("output"), str):
                raise InvalidOutcome("server_protocol", f"the server's tool_outputs hold {output!r:.80}")
            id = str(output.get("call_id"))
            results.append(self.result(id, names.get(id, ""), output["output"]))
        return results

    async def close(self) -> None:
        if self._closes:
            with contextlib.suppress(InvalidOutcome):  # the episode is over in any case
                await self.session.ask("close", {})


def _message(action: Action) -> Message:
    """The policy's turn as a message, with the full text if a call cannot be read."""
    use_text = action.content is None or any(call.error for call in action.tool_calls)
    return Message("assistant", action.text if use_text else str(action.content), action.tool_calls)


def _reward(answer: Mapping[str, Any], route: str) -> float:
    """The reward in an answer. Raises `InvalidOutcome` if there is none, or the server marks it as invalid."""
    check_valid(answer, f"/{route}")
    reward = number(answer.get("reward"))
    if reward is None:
        raise InvalidOutcome("server_protocol", f"/{route} answered with the reward {answer.get('reward')!r:.60}")
    return reward


def _info(answer: Mapping[str, Any], route: str) -> Mapping[str, Any]:
    info = answer.get("info") or {}
    if not isinstance(info, Mapping):
        raise InvalidOutcome("server_protocol", f"/{route} answered with the info {info!r:.60}")
    return info


def _observation(answer: Mapping[str, Any], route: str) -> list[Message]:
    observation = answer.get("observation")
    if observation is not None and not isinstance(observation, str):
        raise InvalidOutcome("server_protocol", f"/{route} answered with the observation {observation!r:.60}")
    return [Message("user", observation)] if observation else []
