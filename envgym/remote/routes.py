"""The requests a server answers. The application carries them out, `openapi` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from pydantic import BaseModel

from .wire import (
    Alive,
    Batch,
    BatchAnswers,
    EnvDescription,
    EnvList,
    Group,
    Health,
    Heartbeat,
    Opened,
    Opening,
    Problem,
    Step,
    Stepped,
    TaskPage,
    TaskQuery,
    Verdicts,
)


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is the application's method; `answer` a body, another content type, None for 204, or 101."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | str | Literal[101] | None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    problems: tuple[int, ...] = ()
    """Statuses of what may go wrong, beside what may go wrong with every route of its kind."""
    open: bool = False
    """Answered without a token."""


ROUTES = (
    Route("GET", "/v1/envs", "list_envs", "The environments that are served", EnvList),
    Route("GET", "/v1/envs/{env}", "describe", "One environment", EnvDescription, problems=(404,)),
    Route(
        "GET", "/v1/envs/{env}/tasks", "tasks", "A page of its tasks", TaskPage, query=TaskQuery,
        problems=(404, 422, 504),
    ),
    Route(
        "POST", "/v1/envs/{env}/score_group", "score_group", "Score finished episodes of one task together", Verdicts,
        Group, problems=(404, 504),
    ),
    Route(
        "POST", "/v1/sessions", "open", "Make an instance under an id of yours and reset it", Opened, Opening,
        problems=(404, 409, 429, 503, 504),
    ),
    Route(
        "POST", "/v1/sessions/heartbeat", "heartbeat", "Renew the leases of sessions", Alive, Heartbeat,
    ),
    Route(
        "POST", "/v1/sessions/{session}/step", "step", "Take one step", Stepped, Step, problems=(404, 409),
    ),
    Route("DELETE", "/v1/sessions/{session}", "close", "Close a session; also one that is gone", None),
    Route(
        "GET", "/v1/channel", "channel", "A WebSocket for requests to many sessions, each answered when it is done",
        101, problems=(426, 503),
    ),
    Route("POST", "/v1/batch", "batch", "Open, step and close many sessions in one call", BatchAnswers, Batch),
    Route("GET", "/livez", "live", "Whether the process lives", Health, open=True),
    Route("GET", "/readyz", "ready", "Whether it takes new sessions", Health, problems=(503,), open=True),
    Route("GET", "/metrics", "metrics", "Counts and times, as Prometheus reads them", "text/plain"),
    Route("GET", "/openapi.json", "openapi", "This document", "application/json"),
)  # fmt: skip

_by_path: dict[tuple[str, ...], dict[str, Route]] = {tuple(route.path.split("/")): {} for route in ROUTES}
for _route in ROUTES:
    _by_path[tuple(_route.path.split("/"))][_route.method] = _route
BRACES = 3
"""Which part of a path may be in braces: that of `/v1/sessions/{session}/step`, say."""
_by_rest = {
    (*parts[:BRACES], *parts[BRACES + 1 :]): routes for parts, routes in _by_path.items() if "{" in "/".join(parts)
}


def match(path: str) -> tuple[Mapping[str, Route], list[str]]:
    """The routes by method at a path as it was sent (still quoted), and what stands for the braces in it.

    Raises a 404 `Problem`. A quoted slash does not part the path.
    """
    parts = path.split("/")
    exact = _by_path.get(tuple(parts))
    if exact is not None and "{" not in path:
        return exact, []
    if len(parts) > BRACES and parts[BRACES]:
        routes = _by_rest.get((*parts[:BRACES], *parts[BRACES + 1 :]))
        if routes is not None:
            return routes, [unquote(parts[BRACES])]
    raise Problem(404, "not-found", "there is nothing at this path; GET /openapi.json lists what there is")
