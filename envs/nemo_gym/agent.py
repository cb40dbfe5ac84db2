"""The NeMo-Gym agent: an agent server of NeMo-Gym runs the episodes, and the policy is its model server.

The agent server gets a row at `/run`, requests each turn from its model server, and answers with the result of its
resources server. This module is the model server: it samples each request from the policy and records the tokens.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.agents.external.chat_api import TOKEN_FIELDS
from envgym.agents.external.conversation import Conversation
from envgym.agents.external.endpoint import TICKET, Endpoint
from envgym.agents.token_level import actions_of
from envgym.env import CheckedEnv
from envgym.errors import ConfigError, InvalidOutcome
from envgym.net.client import HttpClient
from envgym.types import Episode, Limit, Outcome, Task

from . import client, protocol
from .protocol import PARAMS


class NeMoGymConfig(AgentConfig):
    """Settings of the NeMo-Gym agent."""

    head: str = "http://127.0.0.1:11000"
    """URL of NeMo-Gym's head server, whose config has the addresses of the agent server and of its model server."""
    server: str = ""
    """The agent server's name in NeMo-Gym's config; unset: the name in each row (`agent_ref`)."""
    listen: str = ""
    """HOST:PORT at which the policy answers as the model server; unset: as in NeMo-Gym's config (the model server's
    `base_url`, or else its address)."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens that the policy samples per episode; then the episode is truncated."""
    timeout: float = Field(240.0, gt=0)
    """Seconds per episode; then it fails (`agent`)."""

    @field_validator("head")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("the head server's address begins with http://")
        return value.rstrip("/")

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value:
            _address(f"http://{value}")
        return value


class NeMoGym(Agent):
    """Posts each task's row to an agent server of NeMo-Gym (such as `simple_agent`) and takes its answer's reward.

    The environment only provides the rows; it is not stepped. The row's `metadata`, which NeMo-Gym's agents pass to the
    model server, match a request to its episode. All calls of an episode must be one growing sequence of tokens: a call
    that does not begin with everything before it fails the episode (`not_contiguous`).
    """

    Config: ClassVar[type[AgentConfig]] = NeMoGymConfig
    steps_are_turns = False
    config: NeMoGymConfig

    _gym_config: Mapping[str, Any] | None = None
    """NeMo-Gym's config, after the first request to the head server."""

    async def run(self, env: CheckedEnv, task: Task, sampler: Sampler | None, *, seed: int) -> Episode:
        assert sampler is not None, "an agent that uses the policy needs a sampler"
        row = row_of(task)
        conversation = Conversation(self.renderer, sampler, None, self.config.max_tokens, env.spec)
        try:
            async with asyncio.timeout(self.config.timeout), HttpClient() as http:
                url, endpoint = await self._addresses(http, row)
                async with endpoint.session(conversation) as access:
                    metadata = {**(row[PARAMS].get("metadata") or {}), TICKET: access.ticket}
                    body = {**row, PARAMS: {**row[PARAMS], "metadata": metadata}}
                    answer = await client.post_json(http, f"{url}/run", body, kind="agent", seconds=None)
        except TimeoutError:
            message = f"the agent server took longer than {self.config.timeout:g} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        except InvalidOutcome as failure:
            if failure.retryable:
                self._gym_config = None  # the servers may have moved
            raise
        return self._episode(task, conversation, answer)

    def _episode(self, task: Task, conversation: Conversation, answer: Mapping[str, Any]) -> Episode:
        """The episode from the agent server's answer and the sampled turns. Raises `InvalidOutcome` if it has failed or
        has no reward."""
        if failure := answer.get(protocol.FAILURE_CLASS):
            message = f"the agent server says it failed ({failure}): {protocol.failure_reason(answer)}"
            raise InvalidOutcome("agent", message)
        protocol.check_valid(answer, "the agent server")
        reward = protocol.number(answer.get("reward"))
        if reward is None:
            raise InvalidOutcome("agent", f"the agent server answers with {answer.get('reward')!r:.40} as reward")
        conversation.check_turns("the agent server (which must use our model server)")
        check_contiguous(conversation, answer)
        outcome = Outcome.truncate(Limit.ENVIRONMENT) if answer.get("truncated") is True else Outcome.finish()
        metrics = protocol.numbers(answer, {*task.fields, "reward", "mask_sample"})
        return conversation.episode(task, outcome, reward, {"metrics": metrics}, conversation.messages)

    async def _addresses(self, http: HttpClient, row: Mapping[str, Any]) -> tuple[str, Endpoint]:
        """The agent server's URL, and the endpoint at its model server's address."""
        name = self.config.server or (row.get("agent_ref") or {}).get("name") or ""
        if not name:
            raise InvalidOutcome("agent", "the row has no agent_ref: set agent.server")
        if self._gym_config is None:
            try:
                self._gym_config = await client.head_config(self.config.head, http)
            except ConfigError as error:
                raise InvalidOutcome("agent", str(error), retryable=True) from None
        config = self._gym_config
        agent = self._server(config, name, "responses_api_agents")
        url = protocol.url_of(*_configured_address(agent, name, config), self.config.head)
        if self.config.listen:
            return url, _endpoint(*_address(f"http://{self.config.listen}"))
        model = (agent.get("model_server") or {}).get("name")
        if not model:
            raise InvalidOutcome("agent", f"the agent server {name!r} names no model_server")
        entry = self._server(config, model, "responses_api_models")
        base_url = protocol.resolve(entry.get("base_url"), config)
        if isinstance(base_url, list):  # NeMo-Gym's vllm_model accepts several
            base_url = base_url[0] if len(base_url) == 1 else None
        try:
            return url, _endpoint(*(_address(str(base_url)) if base_url else _configured_address(entry, model, config)))
        except ValueError as error:
            raise InvalidOutcome("agent", f"{model} in NeMo-Gym's config: {error}; set agent.listen") from None

    def _server(self, config: Mapping[str, Any], name: str, kind: str) -> Mapping[str, Any]:
        entries = protocol.servers(config, kind)
        if name not in entries:
            names = ", ".join(entries) or "none"
            raise InvalidOutcome("agent", f"{self.config.head} knows no {name!r} among its {kind}: it has {names}")
        return entries[name]


def row_of(task: Task) -> dict[str, Any]:
    """The task's row. Raises `InvalidOutcome` for a task that is no row of NeMo-Gym's."""
    if not isinstance(task.fields.get(PARAMS), Mapping):
        raise InvalidOutcome("agent", f"task {task.id} is no row of NeMo-Gym's: it has no {PARAMS!r}")
    return dict(task.fields)


def check_contiguous(conversation: Conversation, answer: Mapping[str, Any]) -> None:
    """Raise `InvalidOutcome` unless all calls are one growing sequence of tokens, and the answer repeats the sampled
    tokens."""
    rows = conversation.rows
    if len(rows) > 1:
        calls = " + ".join(str(len(row.turns)) for row in rows)
        raise InvalidOutcome(
            "not_contiguous",
            f"the agent server's calls make {len(rows)} sequences ({calls} calls), not one: a call did not begin with "
            "everything before it",
        )
    response = answer.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    repeated = [item for item in output or () if isinstance(item, Mapping) and item.get(TOKEN_FIELDS[1])]
    sampled = [[prefix, list(action.token_ids)] for action, prefix in actions_of(rows[0])]
    if repeated and [[item.get(name) for name in TOKEN_FIELDS[:2]] for item in repeated] != sampled:
        raise InvalidOutcome("not_contiguous", "the tokens in the agent server's answer are not those that we sampled")


_ENDPOINTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], Endpoint]]
_ENDPOINTS = weakref.WeakKeyDictionary()
"""Endpoints by address; agents with the same address share one."""


def _endpoint(host: str, port: int) -> Endpoint:
    endpoints = _ENDPOINTS.setdefault(asyncio.get_running_loop(), {})
    return endpoints.setdefault((host, port), Endpoint(host, port))


def _configured_address(settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    address = protocol.address_of(settings, config)
    if address is None or not address[0]:
        raise InvalidOutcome("agent", f"NeMo-Gym's config gives {name!r} no host and port")
    return address


def _address(url: str) -> tuple[str, int]:
    """The address in the policy's URL. Raises `ValueError`."""
    if (address := protocol.host_and_port(url)) is None:
        raise ValueError(f"the policy's address is HOST:PORT, not {url.removeprefix('http://')!r}")
    return address
