"""Requests to NeMo-Gym's servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import yaml

from envgym.errors import ConfigError, InvalidOutcome, did_you_mean
from envgym.net.client import HttpClient, NoAnswer, exchange, json_object

from .protocol import ROUTES, FlowName, address_of, servers, url_of

CONNECTS = 3
"""Tries to connect: a refused connection has sent nothing."""
LOOKUP_SECONDS = 10.0
"""Time limit of each request of a server look-up."""


class ResourcesSession:
    """One episode's session with a resources server, identified by its own cookies.

    Every failure is an `InvalidOutcome`: `server_unreachable`, `server_lost` (the connection broke after the request
    may have arrived, so that it cannot be repeated), `server_timeout`, `server_error` (an error status) or
    `server_protocol` (an answer outside NeMo-Gym's protocol).
    """

    def __init__(self, url: str, shared: HttpClient, timeout: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self.http = HttpClient(shared, keeps_cookies=True)
        """The client, to be closed with the session."""

    async def ask(self, route: str, body: Mapping[str, Any], *, repeatable: bool = False) -> dict[str, Any]:
        """POST to a route of the server, and return the JSON object of its answer. Raises `InvalidOutcome` for anything
        else.

        `repeatable`: the request carries an id, so that it is sent once more if it was lost.
        """
        try:
            status, text = await self.post(route, body)
        except InvalidOutcome as error:
            if not repeatable or error.kind != "server_lost":
                raise
            status, text = await self.post(route, body)
        if status != 200:
            message = f"{self._url}/{route} answers {status}: {' '.join(text.split())[:300]}"
            raise InvalidOutcome("server_error", message, retryable=status >= 500 or status == 429)
        return _object(text, f"{self._url}/{route}", "server_protocol")

    async def post(self, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text of the server's answer to a POST. Raises `InvalidOutcome` if there is none."""
        # Quoted, since `/` and `..` in a tool's name would lead to another route.
        url, data = f"{self._url}/{quote(route, safe='')}", json.dumps(dict(body)).encode()
        try:
            status, _, answer = await exchange(self.http, "POST", url, data, seconds=self._timeout, connects=CONNECTS)
        except NoAnswer as failure:
            kind, message = {
                "timeout": ("server_timeout", f"{url} has not answered within {self._timeout:g} s"),
                "lost": ("server_lost", f"{url}: the connection broke ({failure.reason})"),
                "unusable": ("server_protocol", f"{url} {failure}"),
            }.get(failure.kind, ("server_unreachable", f"{self._url}: Cannot connect ({failure.reason})"))
            raise InvalidOutcome(kind, message, retryable=kind != "server_protocol") from None
        return status, answer.decode("utf-8", "replace")


async def post_json(http: HttpClient, url: str, body: Any, *, kind: str, seconds: float | None) -> dict[str, Any]:
    """The JSON object of a server's answer to a POST. Raises `InvalidOutcome` of this kind for anything else."""
    try:
        status, _, content = await exchange(http, "POST", url, json.dumps(body).encode(), seconds=seconds)
    except NoAnswer as failure:
        raise InvalidOutcome(kind, f"{url} {failure}", retryable=failure.kind != "unusable") from None
    text = content.decode("utf-8", "replace")
    if status != 200:
        raise InvalidOutcome(kind, f"{url} answers with {status}: {text[:300]}", retryable=status >= 500)
    return _object(text, url, kind)


def _object(text: str, url: str, kind: str) -> dict[str, Any]:
    """The JSON object in a text. Raises `InvalidOutcome` of this kind for anything else."""
    if (answer := json_object(text)) is None:
        raise InvalidOutcome(kind, f"{url} answers no JSON object: {text[:80]!r}")
    return answer


# -- looking servers up --------------------------------------------------------------------------------


async def head_config(head: str, http: HttpClient) -> Mapping[str, Any]:
    """The config of a head server, which returns it as YAML within a JSON string.

    Raises `ConfigError`. No message quotes the config, since it may hold API keys.
    """
    status, text = await _get(f"{head.rstrip('/')}/global_config_dict_yaml", http)
    config: Any = None
    with contextlib.suppress(ValueError, AttributeError, RecursionError, yaml.YAMLError):
        config = yaml.safe_load(json.loads(text)) if status == 200 else None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{head}: not a head server of NeMo-Gym: it has no configuration at /global_config_dict_yaml")
    return config


async def find_resources_server(head: str, name: str | None, http: HttpClient) -> str:
    """The URL of the resources server `name` in a head server's config, or of the only one there.

    Raises `ConfigError`.
    """
    config = await head_config(head, http)
    entries = servers(config, "resources_servers")
    located = {name: address_of(settings, config) for name, settings in entries.items()}
    addresses = {name: address for name, address in located.items() if address is not None}
    names = ", ".join(addresses) or "none at all"
    if name is None and len(addresses) != 1:
        raise ConfigError(f"{head}: which resources server? set env.server to one of {names}")
    name = next(iter(addresses)) if name is None else name
    if name not in addresses:
        raise ConfigError(f"{head}: no resources server {name!r}, only {names}.{did_you_mean(name, addresses)}")
    return url_of(*addresses[name], head)


async def flow_of(url: str, http: HttpClient, preferred: FlowName | None = None) -> FlowName:
    """The flow whose routes the server at `url` has; if it has both, `preferred`, or tools. Raises `ConfigError`."""
    # The routes accept only POST, so that a GET detects them without side effects.
    flows = []
    for flow, routes in ROUTES.items():
        statuses = [(await _get(f"{url.rstrip('/')}/{route}", http))[0] for route in routes]
        if statuses == [405, 405]:
            flows.append(flow)
    if not flows:
        missing = " nor ".join(f"/{first} and /{second}" for first, second in ROUTES.values())
        raise ConfigError(f"{url}: not a resources server of NeMo-Gym: it has neither {missing}")
    if preferred is not None and preferred not in flows:
        raise ConfigError(f"{url}: this server has no routes of the flow {preferred!r}, only {flows[0]!r}")
    return preferred or flows[0]


async def _get(url: str, http: HttpClient) -> tuple[int, str]:
    """Status and text of the answer to a GET. Raises `ConfigError` if there is none."""
    try:
        status, _, content = await exchange(http, "GET", url, seconds=LOOKUP_SECONDS)
    except NoAnswer as failure:
        if failure.kind == "url":
            raise ConfigError(f"{url}: not a usable URL; it looks like http://127.0.0.1:11000") from None
        raise ConfigError(f"{url} {failure}; is the server running, and well?") from None
    return status, content.decode("utf-8", "replace")
