"""The NeMo-Gym agent: an agent server of NeMo-Gym plays its own rows, and the policy behind it is trained.

Their server gets the row at `/run`, asks its model server for each turn, and answers with what its resources server
verified. Here we are the model server: what is asked for is sampled from the policy and recorded token by token.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp
import yaml
from pydantic import Field, field_validator

from envgym.agent import Agent, AgentConfig, Sampler
from envgym.agents.external.conversation import Conversation
from envgym.agents.external.endpoint import TICKET, Endpoint
from envgym.env import CheckedEnv
from envgym.errors import InvalidOutcome
from envgym.render import Renderer
from envgym.responses import TOKEN_FIELDS
from envgym.types import Episode, Limit, Outcome, Row, Task

from .protocol import FAILURE_CLASS, number, resolved, url_of, void_kind

ROW = "responses_create_params"
"""The field by which a task is a row of NeMo-Gym's."""
PASSING = ("transport_", "provider_", "session_", "judge_failed")
"""How kinds of failure begin that another try may not meet."""
CONNECT_SECONDS = 10.0
MAX_ANSWER = 64 * 2**20
"""Bytes an answer may have: it repeats the row and every turn with its tokens."""


class NeMoGymConfig(AgentConfig):
    """Settings of the NeMo-Gym agent."""

    head: str = "http://127.0.0.1:11000"
    """Their head server, which knows where the agent server is and where it expects its model server."""
    server: str = ""
    """The agent server's name in their config; unset: each row's own (`agent_ref`)."""
    listen: str = ""
    """HOST:PORT where the policy answers as their model server; unset: as their config says (the model server's own
    address, or where it has a `base_url` that one)."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens the policy may sample in a whole episode; then it answers no more, and the episode is truncated."""
    timeout: float = Field(240.0, gt=0)
    """Seconds an episode may take; then it fails (`agent`)."""

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
    """Posts each task's row to an agent server of NeMo-Gym (`simple_agent`, say) and takes the reward it answers with.

    The environment itself is not stepped: it gives the rows. A request is matched to its episode by the row's
    `metadata`, which their agents hand on to the model server. All calls of an episode must be one growing sequence of
    tokens: where one does not begin with everything before it the episode fails (`not_contiguous`).
    """

    Config: ClassVar[type[AgentConfig]] = NeMoGymConfig
    config: NeMoGymConfig

    def __init__(self, renderer: Renderer, config: AgentConfig) -> None:
        super().__init__(renderer, config)
        self._theirs: Mapping[str, Any] | None = None

    async def run(self, env: CheckedEnv, task: Task, engine: Sampler | None, *, seed: int) -> Episode:
        assert engine is not None, "a sampling agent is given an engine"
        row = row_of(task)
        conversation = Conversation(self.renderer, engine, None, self.config.max_tokens)
        try:
            async with asyncio.timeout(self.config.timeout), aiohttp.ClientSession() as client:
                url, endpoint = await self._addresses(client, row)
                async with endpoint.session(conversation) as access:
                    answer = await _post(client, f"{url}/run", _with_ticket(row, access.ticket))
        except TimeoutError:
            message = f"the agent server took longer than {self.config.timeout:g} s"
            raise InvalidOutcome("agent", message, retryable=True) from None
        except InvalidOutcome as failure:
            if failure.retryable:
                self._theirs = None  # where it was may be where it is no more
            if conversation.error is not None:  # the cause: their server failed because we did
                raise conversation.error from None
            raise
        if conversation.error is not None:  # their server made something of it all the same
            raise conversation.error
        return self._episode(task, conversation, answer)

    def _episode(self, task: Task, conversation: Conversation, answer: Mapping[str, Any]) -> Episode:
        if failure := answer.get(FAILURE_CLASS):
            raise InvalidOutcome("agent", f"the agent server says it failed ({failure}): {_said(answer)}")
        if (kind := void_kind(answer)) is not None:
            message = f"the agent server says that the sample is void: {_said(answer)}"
            raise InvalidOutcome(kind, message, retryable=kind.startswith(PASSING))
        reward = number(answer.get("reward"))
        if reward is None:
            raise InvalidOutcome("agent", f"the agent server answers with {answer.get('reward')!r:.40} as reward")
        if not conversation.turns:
            raise InvalidOutcome("agent", "the agent server made no call to the policy: does it use our model server?")
        check_contiguous(conversation, answer)
        outcome = Outcome.completed()
        if conversation.limit is not None:
            outcome = Outcome.truncated(conversation.limit)
        elif answer.get("truncated") is True:
            outcome = Outcome.truncated(Limit.ENVIRONMENT)
        own = {*task.fields, "reward", "mask_sample"}
        numbers = {name: number(value) for name, value in answer.items() if name not in own and name[:1] != "_"}
        metrics = {name: value for name, value in numbers.items() if value is not None}
        return conversation.episode(task, outcome, reward, {"metrics": metrics}, conversation.messages)

    # -- where their server is, and where it expects ours ---------------------------------------------------

    async def _addresses(self, client: aiohttp.ClientSession, row: Mapping[str, Any]) -> tuple[str, Endpoint]:
        """The agent server's URL, and the endpoint at the address where it looks for its model server."""
        name = self.config.server or (row.get("agent_ref") or {}).get("name") or ""
        if not name:
            raise InvalidOutcome("agent", "whose row is it? It has no agent_ref: set agent.server")
        if self._theirs is None:
            self._theirs = await _their_config(client, self.config.head)
        agent = _instance(self._theirs, name, "responses_api_agents", self.config.head)
        url = url_of(*_own_address(agent, name, self._theirs), self.config.head)
        if self.config.listen:
            return url, _endpoint(*_address(f"http://{self.config.listen}"))
        model = (agent.get("model_server") or {}).get("name")
        if not model:
            raise InvalidOutcome("agent", f"the agent server {name!r} names no model_server")
        entry = _instance(self._theirs, model, "responses_api_models", self.config.head)
        base_url = resolved(entry.get("base_url"), self._theirs)
        if isinstance(base_url, list):  # their vllm_model spreads over several
            base_url = base_url[0] if len(base_url) == 1 else None
        try:
            return url, _endpoint(*(_address(str(base_url)) if base_url else _own_address(entry, model, self._theirs)))
        except ValueError as error:
            raise InvalidOutcome("agent", f"{model} in NeMo-Gym's config: {error}; set agent.listen") from None


def row_of(task: Task) -> dict[str, Any]:
    """The row that a task is. Raises `InvalidOutcome` for a task of another kind."""
    if not isinstance(task.fields.get(ROW), Mapping):
        raise InvalidOutcome("agent", f"task {task.id} is no row of NeMo-Gym's: it has no {ROW!r}")
    return dict(task.fields)


def check_contiguous(conversation: Conversation, answer: Mapping[str, Any]) -> None:
    """Raise `InvalidOutcome` unless all calls were one growing sequence of tokens, and those that the answer repeats
    are the ones that were sampled."""
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
    told = [item for item in output or () if isinstance(item, Mapping) and item.get(TOKEN_FIELDS[1])]
    if told and [[item.get(name) for name in TOKEN_FIELDS[:2]] for item in told] != _calls(rows[0]):
        raise InvalidOutcome("not_contiguous", "the tokens in the agent server's answer are not those that we sampled")


def _calls(row: Row) -> list[list[list[int]]]:
    """Of each call in a row the tokens it was sampled after, and those that were sampled."""
    calls, before = [], list[int]()
    for segment in row.segments:
        if segment.role == "action":
            calls.append([before, list(segment.token_ids)])
        before = [*before, *segment.token_ids]
    return calls


def _with_ticket(row: Mapping[str, Any], ticket: str) -> dict[str, Any]:
    params = row[ROW]
    return {**row, ROW: {**params, "metadata": {**(params.get("metadata") or {}), TICKET: ticket}}}


_ENDPOINTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], Endpoint]]
_ENDPOINTS = weakref.WeakKeyDictionary()
"""Agents that are expected at the same address share the endpoint there."""


def _endpoint(host: str, port: int) -> Endpoint:
    shared = _ENDPOINTS.setdefault(asyncio.get_running_loop(), {})
    return shared.setdefault((host, port), Endpoint(host, port))


async def _their_config(client: aiohttp.ClientSession, head: str) -> Mapping[str, Any]:
    """The merged config, of which the head server tells as YAML within a JSON string."""
    text = await _answer(client.get(f"{head}/global_config_dict_yaml", timeout=_connecting()), head)
    try:
        config = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        raise InvalidOutcome("agent", f"{head} does not answer as a head server of NeMo-Gym does")
    return config


def _instance(config: Mapping[str, Any], name: str, kind: str, head: str) -> Mapping[str, Any]:
    """A server's own settings: two levels below its name, under its kind and its implementation."""
    kinds = config.get(name)
    found = kinds.get(kind) if isinstance(kinds, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        known = [other for other, value in config.items() if isinstance(value, Mapping) and kind in value]
        has = f"it has {', '.join(map(str, known))}" if known else "it has none"
        raise InvalidOutcome("agent", f"{head} knows no {name!r} among its {kind}: {has}")
    settings = next(iter(found.values()))
    return settings if isinstance(settings, Mapping) else {}


def _own_address(settings: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    host, port = (resolved(settings.get(key), config) for key in ("host", "port"))
    if not isinstance(host, str) or not isinstance(port, int):
        raise InvalidOutcome("agent", f"NeMo-Gym's config gives {name!r} no host and port")
    return host, port


def _address(url: str) -> tuple[str, int]:
    """Host and port of a URL. Raises `ValueError`."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise ValueError(f"the policy's address is HOST:PORT, not {url.removeprefix('http://')!r}")
    return parts.hostname, port


def _connecting() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=CONNECT_SECONDS)


async def _post(client: aiohttp.ClientSession, url: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)  # the episode has a deadline
    answer = await _answer(client.post(url, json=row, timeout=timeout), url)
    if not isinstance(answer, Mapping):
        raise InvalidOutcome("agent", f"{url} answers with no object")
    return answer


async def _answer(request: Any, url: str) -> Any:
    """The JSON that a server answers with. Raises `InvalidOutcome` (`agent`) for anything else."""
    try:
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise InvalidOutcome("agent", f"{url} answers with more than {MAX_ANSWER} bytes")
    except aiohttp.ClientError as error:
        message = f"{url} cannot be reached: {error or type(error).__name__}"
        raise InvalidOutcome("agent", message, retryable=True) from None
    if response.status != 200:
        said = body.decode(errors="replace")[:300]
        raise InvalidOutcome("agent", f"{url} answers with {response.status}: {said}", retryable=response.status >= 500)
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidOutcome("agent", f"{url} answers with something that is not JSON") from None


def _said(answer: Mapping[str, Any]) -> str:
    said = answer.get("failure_reason") or answer.get("error_message") or answer.get("error") or "it says nothing more"
    return " ".join(str(said).split())[:300]
