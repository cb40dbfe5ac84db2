"""NeMo-Gym's protocol: the fields of rows and answers, requests to its servers, and the config that names them."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Container, Mapping
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import aiohttp
import yaml

from envgym.errors import ConfigError, InvalidOutcome, did_you_mean

PARAMS = "responses_create_params"
"""The field of a row that holds the request it makes of a policy."""
FAILURE_CLASS = "_ng_failure_class"
"""The field of a rollout that failed, and of an answer that a server's own guards gave beside a reward of zero."""
TRANSIENT = ("transport_", "provider_", "session_", "judge_failed")
"""Beginnings of the kinds of failure that another try may not meet."""
WILDCARDS = ("0.0.0.0", "::", "")
"""Hosts that a server listens on and nobody can call: it is where its head server is."""
DEPTH = 5
"""Longest chain of references in a config that is followed."""
CONNECT_TRIES = 3
"""Tries of a connection that is refused: nothing has been sent then."""
FIRST_PAUSE = 0.2
"""Seconds before the second try; doubled before the third."""
KEEPALIVE = 2.0
"""Seconds an unused connection is kept: less than servers do, or a request might meet one that is just closing."""
MAX_ANSWER = 64 * 2**20
"""Bytes an answer may have. A rollout repeats the row and every turn with its tokens."""
LOOKUP_SECONDS = 10.0
"""Time limit of each request that looks a server up."""

FlowName = Literal["tools", "gymnasium"]
ROUTES: dict[FlowName, tuple[str, str]] = {"tools": ("seed_session", "verify"), "gymnasium": ("reset", "step")}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_valid(answer: Mapping[str, Any], server: str) -> None:
    """Raise `InvalidOutcome`, by the kind of failure, where an answer of `server` says that the sample is void,
    whatever its reward."""
    masked, kind = answer.get("mask_sample"), answer.get(FAILURE_CLASS) or answer.get("failure_kind")
    # A kind alone voids the sample; with `mask_sample` false it is a remark on one that was measured all the same.
    if masked is True or answer.get(FAILURE_CLASS) or (kind and masked is None):
        kind = re.sub(r"\W+", "_", str(kind or "masked"))[:60]
        retryable = kind.startswith(TRANSIENT) and not answer.get("_ng_failure_terminal")
        message = f"{server} says that the sample is void: {failure_reason(answer)}"
        raise InvalidOutcome(kind, message, retryable=retryable)


def failure_reason(answer: Mapping[str, Any]) -> str:
    """The reason that an answer gives for a failure, in one line."""
    fields = ("failure_reason", "_ng_failure_judge_error", "error_message", "error")
    reason = next((answer[field] for field in fields if answer.get(field)), "it gives no reason")
    return " ".join(str(reason).split())[:300]


def number(value: Any) -> float | None:
    """A finite number as JSON has it, truth among them; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(fields: Mapping[str, Any], without: Container[str] = ()) -> dict[str, float]:
    """The finite numbers among the fields, but for those named in `without` or with a leading underscore."""
    found = {str(name): number(value) for name, value in fields.items() if name not in without}
    return {name: value for name, value in found.items() if value is not None and not name.startswith("_")}


# -- requests ----------------------------------------------------------------------------------------------


def connector() -> aiohttp.TCPConnector:
    """The connections that all episodes share. Without a limit: none should wait for another's slow call."""
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)


class Session:
    """One episode's session with a resources server. The server knows it by its cookies alone, which are its own.

    Every failure is an `InvalidOutcome`: `server_unreachable`, `server_lost` (the connection broke when the request may
    have arrived, so that it cannot be sent again), `server_timeout`, `server_error` (an error status) or
    `server_protocol` (an answer that NeMo-Gym does not give).
    """

    def __init__(self, url: str, connections: aiohttp.TCPConnector, timeout: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._http = aiohttp.ClientSession(
            connector=connections,
            connector_owner=False,
            # The usual jar refuses cookies of hosts that are addresses, and every session would be a new one.
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(total=timeout),
        )

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, route: str, body: Mapping[str, Any], *, repeatable: bool = False) -> dict[str, Any]:
        """POST to a route of the server's own, and the JSON object of its answer.

        `repeatable`: the server knows the request by an id in it, so that a lost one is sent once more.
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
        """Status and text of the server's answer to a POST, whatever they are."""
        # Encoded here, as `/` and `..` in a tool's name would lead elsewhere.
        url = f"{self._url}/{quote(route, safe='')}"
        for attempt in range(1, CONNECT_TRIES + 1):
            try:
                async with self._http.post(url, json=dict(body), allow_redirects=False) as answer:
                    return answer.status, await read(answer, "server_protocol")
            except aiohttp.ClientConnectorError as error:
                if attempt == CONNECT_TRIES:
                    raise InvalidOutcome("server_unreachable", f"{self._url}: {error}", retryable=True) from None
                await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            except TimeoutError:
                message = f"{url} has not answered within {self._timeout:g} s"
                raise InvalidOutcome("server_timeout", message, retryable=True) from None
            except (aiohttp.ClientError, ConnectionError) as error:
                message = f"{url}: the connection broke ({error or type(error).__name__})"
                raise InvalidOutcome("server_lost", message, retryable=True) from None
        raise AssertionError("every try returns or raises")


async def read(answer: aiohttp.ClientResponse, kind: str) -> str:
    """The text of an answer. Raises `InvalidOutcome` of this kind for one that is too long."""
    content = bytearray()
    async for chunk in answer.content.iter_chunked(2**16):
        content += chunk
        if len(content) > MAX_ANSWER:
            raise InvalidOutcome(kind, f"{answer.url} answers with more than {MAX_ANSWER} bytes")
    return content.decode("utf-8", "replace")


async def post_json(
    http: aiohttp.ClientSession, url: str, body: Any, *, kind: str, timeout: aiohttp.ClientTimeout
) -> dict[str, Any]:
    """The JSON object that a server answers a POST with. Raises `InvalidOutcome` of this kind for anything else."""
    try:
        async with http.post(url, json=body, timeout=timeout) as answer:
            text = await read(answer, kind)
    except (aiohttp.ClientError, OSError) as error:
        message = f"{url} cannot be reached: {error or type(error).__name__}"
        raise InvalidOutcome(kind, message, retryable=True) from None
    if answer.status != 200:
        message = f"{url} answers with {answer.status}: {text[:300]}"
        raise InvalidOutcome(kind, message, retryable=answer.status >= 500)
    return _object(text, url, kind)


def _object(text: str, url: str, kind: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise InvalidOutcome(kind, f"{url} answers no JSON object: {text[:80]!r}")
    return answer


# -- a head server's config -------------------------------------------------------------------------------


def servers(config: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    """The settings of the config's servers of one kind (`resources_servers`, …), by name. They lie two levels below
    the name, under the kind and the implementation."""
    found = {}
    for name, kinds in config.items():
        implementations = kinds.get(kind) if isinstance(kinds, Mapping) else None
        settings = next(iter(implementations.values()), None) if isinstance(implementations, Mapping) else None
        if isinstance(settings, Mapping):
            found[str(name)] = settings
    return found


def address_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of a server, where the config has a port. The host may be empty."""
    host, port = (resolved(settings.get(key), config) for key in ("host", "port"))
    return (str(host or ""), port) if isinstance(port, int) else None


def url_of(host: str, port: int, head: str) -> str:
    """The URL of a server that `head`, the URL of a head server, says is at `host` and `port`."""
    if host in WILDCARDS:
        host = urlsplit(head).hostname or host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int] | None:
    """Host and port of a URL that has both."""
    parts = urlsplit(url)
    try:
        return (parts.hostname, parts.port) if parts.hostname and parts.port is not None else None
    except ValueError:
        return None


def resolved(value: Any, config: Mapping[str, Any], depth: int = DEPTH) -> Any:
    """A value of a config with `${another.key}` replaced by the value there: a head server gives its config as it was
    written. A reference to nothing stays as it is."""
    if isinstance(value, list):
        return [resolved(one, config, depth) for one in value]
    if not isinstance(value, str) or depth == 0:
        return value
    if whole := _REFERENCE.fullmatch(value):
        found: Any = config
        for key in whole[1].split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return value if found is None else resolved(found, config, depth - 1)
    return _REFERENCE.sub(lambda part: str(resolved(part[0], config, depth - 1)), value)


async def head_config(head: str, http: aiohttp.ClientSession) -> Mapping[str, Any]:
    """The config of a head server, which gives it as YAML within a JSON string.

    Raises `ConfigError`. The config may hold keys: no message quotes it.
    """
    status, text = await _get(f"{head.rstrip('/')}/global_config_dict_yaml", http)
    config: Any = None
    if status == 200:
        try:
            config = yaml.safe_load(json.loads(text))
        except (ValueError, AttributeError, RecursionError, yaml.YAMLError):
            config = None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{head}: not a head server of NeMo-Gym: it has no configuration at /global_config_dict_yaml")
    return config


async def find_resources_server(head: str, name: str | None, http: aiohttp.ClientSession) -> str:
    """The URL of the resources server that a head server's config calls `name`, or of the only one there.

    Raises `ConfigError`.
    """
    config = await head_config(head, http)
    entries = servers(config, "resources_servers")
    found = {name: at for name, settings in entries.items() if (at := address_of(settings, config)) is not None}
    names = ", ".join(found) or "none at all"
    if name is None and len(found) != 1:
        raise ConfigError(f"{head}: which resources server? set env.server to one of {names}")
    name = next(iter(found)) if name is None else name
    if name not in found:
        raise ConfigError(f"{head}: no resources server {name!r}, only {names}.{did_you_mean(name, found)}")
    return url_of(*found[name], head)


async def flow_of(url: str, http: aiohttp.ClientSession, wanted: FlowName | None = None) -> FlowName:
    """The flow that the server at `url` has routes for; where it has both, `wanted`, or tools. Raises `ConfigError`."""
    # The routes take POST alone, so that a GET tells of them and begins nothing.
    flows = []
    for flow, routes in ROUTES.items():
        statuses = [(await _get(f"{url.rstrip('/')}/{route}", http))[0] for route in routes]
        if statuses == [405, 405]:
            flows.append(flow)
    if not flows:
        missing = " nor ".join(f"/{first} and /{second}" for first, second in ROUTES.values())
        raise ConfigError(f"{url}: not a resources server of NeMo-Gym: it has neither {missing}")
    if wanted is not None and wanted not in flows:
        raise ConfigError(f"{url}: this server does not speak the flow {wanted!r}, only {flows[0]!r}")
    return wanted or flows[0]


async def _get(url: str, http: aiohttp.ClientSession) -> tuple[int, str]:
    timeout = aiohttp.ClientTimeout(total=LOOKUP_SECONDS)
    try:
        async with http.get(url, allow_redirects=False, timeout=timeout) as answer:
            return answer.status, await answer.text(errors="replace")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise ConfigError(f"{url}: not a usable URL; it looks like http://127.0.0.1:11000") from None
    except TimeoutError:
        raise ConfigError(f"{url}: no answer within {LOOKUP_SECONDS:g} s; is the server well?") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConfigError(
            f"{url} cannot be reached ({error or type(error).__name__}); is the server running?"
        ) from None
