"""Finds a NeMo-Gym resources server, by its URL or by its name at the head server, and which flow it speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import aiohttp
import yaml

from envgym.errors import ConfigError, did_you_mean

from .protocol import resolved, url_of

Flow = Literal["tools", "gymnasium"]

SECONDS = 10.0
"""How long each question may take."""
ROUTES: dict[Flow, tuple[str, str]] = {"tools": ("seed_session", "verify"), "gymnasium": ("reset", "step")}


async def find(head: str, server: str | None, connections: aiohttp.TCPConnector) -> str:
    """The URL of the resources server that a head server's configuration calls `server`, or of the only one there.

    Raises `ConfigError`. The configuration may hold keys: no message quotes it.
    """
    status, text = await _get(f"{head.rstrip('/')}/global_config_dict_yaml", connections)
    config: Any = None
    if status == 200:
        try:
            config = yaml.safe_load(json.loads(text))
        except (ValueError, AttributeError, yaml.YAMLError):
            config = None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{head}: not a head server of NeMo-Gym: it has no configuration at /global_config_dict_yaml")
    servers = {name: found for name, entry in config.items() if (found := _resources_server(entry, config)) is not None}
    if server is None and len(servers) == 1:
        server = next(iter(servers))
    if server is None:
        raise ConfigError(f"{head}: which resources server? set env.server to one of {_list(servers)}")
    if server not in servers:
        raise ConfigError(
            f"{head}: no resources server {server!r}, only {_list(servers)}.{did_you_mean(server, servers)}"
        )
    return url_of(*servers[server], head)


async def flow_of(url: str, connections: aiohttp.TCPConnector, wanted: Flow | None = None) -> Flow:
    """The flow that the server at `url` speaks; where it speaks both, `wanted`, or tools. Raises `ConfigError`."""
    spoken = [flow for flow in ROUTES if await _has(url, flow, connections)]
    if not spoken:
        routes = " nor ".join(f"/{first} and /{second}" for first, second in ROUTES.values())
        raise ConfigError(f"{url}: not a resources server of NeMo-Gym: it has neither {routes}")
    if wanted is not None and wanted not in spoken:
        raise ConfigError(f"{url}: this server does not speak the flow {wanted!r}, only {spoken[0]!r}")
    return wanted or spoken[0]


async def _has(url: str, flow: Flow, connections: aiohttp.TCPConnector) -> bool:
    """Whether the routes are there. They take POST alone, so that asking for them with GET begins nothing."""
    answers = [(await _get(f"{url.rstrip('/')}/{route}", connections))[0] for route in ROUTES[flow]]
    return all(status == 405 for status in answers)


async def _get(url: str, connections: aiohttp.TCPConnector) -> tuple[int, str]:
    try:
        async with (
            aiohttp.ClientSession(
                connector=connections, connector_owner=False, timeout=aiohttp.ClientTimeout(total=SECONDS)
            ) as http,
            http.get(url, allow_redirects=False) as answer,
        ):
            return answer.status, await answer.text(errors="replace")
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
        raise ConfigError(f"{url}: not a usable URL; it looks like http://127.0.0.1:11000") from None
    except TimeoutError:
        raise ConfigError(f"{url}: no answer within {SECONDS:g} s; is the server well?") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        what = str(error) or type(error).__name__
        raise ConfigError(f"{url}: nothing that can be used answers there ({what}); is the server running?") from None


def _resources_server(entry: Any, config: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of an entry of the configuration, where it is a resources server's."""
    servers = entry.get("resources_servers") if isinstance(entry, Mapping) else None
    if not isinstance(servers, Mapping) or len(servers) != 1:
        return None
    settings = next(iter(servers.values()))
    if not isinstance(settings, Mapping):
        return None
    host, port = (resolved(settings.get(key), config) for key in ("host", "port"))
    return (str(host or ""), port) if isinstance(port, int) else None


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(map(str, names)) or "none at all"
