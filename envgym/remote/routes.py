"""The requests that a server answers. `application` carries them out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from pydantic import BaseModel

from envgym.net.problems import Problem

from . import wire


@dataclass(frozen=True, slots=True)
class Route:
    """A request that the server answers: `name` is the application's method for it, `body` and `query` are checked
    against these models."""

    method: str
    path: str
    name: str
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    open: bool = False
    """Answered without a token."""


_ENV, _SESSIONS = "/v1/envs/{env}", "/v1/sessions"
ROUTES = (
    Route("GET", "/v1/envs", "list_envs"),
    Route("GET", _ENV, "describe"),
    Route("GET", f"{_ENV}/tasks", "tasks", query=wire.TaskQuery),
    Route("POST", f"{_ENV}/score_group", "score_group", wire.GroupToScore),
    Route("POST", _SESSIONS, "open", wire.Opening),
    Route("POST", f"{_SESSIONS}/heartbeat", "heartbeat", wire.Heartbeat),
    Route("POST", f"{_SESSIONS}/{{session}}/step", "step", wire.Step),
    Route("DELETE", f"{_SESSIONS}/{{session}}", "close"),
    Route("GET", "/v1/channel", "channel"),
    Route("GET", "/livez", "live", open=True),
    Route("GET", "/readyz", "ready", open=True),
    Route("GET", "/metrics", "metrics"),
)

_VARIABLE = 3
"""Index of the path's part that may be in braces, as in `/v1/sessions/{session}/step`."""
_by_parts: dict[tuple[str, ...], dict[str, Route]] = {}
for _route in ROUTES:
    _by_parts.setdefault(tuple(re.sub("{.*}", "{}", _route.path).split("/")), {})[_route.method] = _route


def match(path: str, method: str) -> tuple[Route, list[str]]:
    """The route at a path as it was sent (still quoted), and the values of the braces in it.

    Raises a 404 or a 405 `Problem`. A quoted slash does not separate parts. This is not aiohttp's router: most
    requests are messages of a channel, a path and a body, and making an aiohttp request for each would cost more than
    all other work on it.
    """
    parts, values = path.split("/"), []
    routes = _by_parts.get(tuple(parts)) if "{" not in path else None
    if routes is None and len(parts) > _VARIABLE and parts[_VARIABLE]:
        routes = _by_parts.get((*parts[:_VARIABLE], "{}", *parts[_VARIABLE + 1 :]))
        values = [unquote(parts[_VARIABLE])]
    if routes is None:
        raise Problem(404, "not-found", "there is nothing at this path")
    if method not in routes:
        allowed = ", ".join(sorted({*routes, *(["HEAD"] if "GET" in routes else [])}))
        raise Problem(405, "invalid-request", f"this path answers {allowed}", headers={"Allow": allowed})
    return routes[method], values
