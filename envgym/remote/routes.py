"""The requests a server answers, and the OpenAPI document that describes them. `application` carries them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from envgym.episodes.record import to_record
from envgym.net.problems import Problem, ProblemBody
from envgym.types import Episode, Outcome, Task

from . import wire


@dataclass(frozen=True, slots=True)
class Route:
    """A request that the server answers: `name` is the application's method for it, `answer` the class of the answer's
    body. Instead of a class it may be another content type, None for status 204, or 101 for a channel."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | str | Literal[101] | None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    open: bool = False
    """Answered without a token."""


_ENV, _SESSIONS = "/v1/envs/{env}", "/v1/sessions"
ROUTES = (
    Route("GET", "/v1/envs", "list_envs", "The environments that are served", wire.EnvList),
    Route("GET", _ENV, "describe", "One environment", wire.EnvDescription),
    Route("GET", f"{_ENV}/tasks", "tasks", "A page of its tasks", wire.TaskPage, query=wire.TaskQuery),
    Route("POST", f"{_ENV}/score_group", "score_group", "Score finished episodes of one task together",
          wire.Verdicts, wire.GroupToScore),
    Route("POST", _SESSIONS, "open", "Make an instance under an id of yours and reset it", wire.Opened, wire.Opening),
    Route("POST", f"{_SESSIONS}/heartbeat", "heartbeat", "Renew the leases of sessions", wire.Alive, wire.Heartbeat),
    Route("POST", f"{_SESSIONS}/{{session}}/step", "step", "Take one step", wire.Stepped, wire.Step),
    Route("DELETE", f"{_SESSIONS}/{{session}}", "close", "Close a session; also one that is gone", None),
    Route("GET", "/v1/channel", "channel", "A WebSocket for requests, each answered when it is done", 101),
    Route("GET", "/livez", "live", "Whether the process lives", wire.Health, open=True),
    Route("GET", "/readyz", "ready", "Whether it takes new sessions", wire.Health, open=True),
    Route("GET", "/metrics", "metrics", "Counts and times, as Prometheus reads them", "text/plain"),
    Route("GET", "/openapi.json", "openapi", "This document", "application/json"),
)  # fmt: skip

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
        raise Problem(404, "not-found", "there is nothing at this path; GET /openapi.json lists what there is")
    if method not in routes:
        allowed = ", ".join(sorted({*routes, *(["HEAD"] if "GET" in routes else [])}))
        raise Problem(405, "invalid-request", f"this path answers {allowed}", headers={"Allow": allowed})
    return routes[method], values


# ---------------------------------------------------------------------------------------------------------
# The OpenAPI document

_REF = "#/components/schemas/{model}"
_SESSION = "example"
EXAMPLES: Mapping[str, Any] = {
    "open": {"session_id": _SESSION, "seed": 0},
    "step": {"step_id": 0, "action": {"text": "an answer"}},
    "heartbeat": {"session_ids": [_SESSION]},
    "score_group": {
        "task": {"id": "example"},
        "episodes": [to_record(Episode("e", Task("example"), Outcome.finish(), reward=1.0))],
    },
}
"""Valid bodies, in the order of the routes."""
_PROBLEM = {
    "description": "A problem (RFC 9457): its `type`, a URN, is of the kinds in docs/reference/wire_protocol.md",
    "content": {"application/problem+json": {"schema": {"$ref": _REF.format(model="ProblemBody")}}},
    "headers": {"Retry-After": {"description": "Seconds to wait, of 429 and 503", "schema": {"type": "integer"}}},
}


def document(envs: Sequence[str], *, tokens: bool) -> bytes:
    """The document as JSON, of a server of the environments called `envs`; `tokens`: whether it requires them."""
    models = {model for route in ROUTES for model in (route.body, route.answer) if isinstance(model, type)}
    model_modes: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in models | {ProblemBody}]
    model_modes.sort(key=lambda pair: pair[0].__name__)
    schemas = models_json_schema(model_modes, ref_template=_REF)[1]["$defs"]
    schemas["Opening"]["properties"]["env"]["enum"] = ["", *envs]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, envs, tokens)
    components: dict[str, Any] = {"schemas": schemas}
    if tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    info = {"title": "envgym", "version": str(wire.VERSION), "description": "Environments of envgym over HTTP."}
    return json.dumps({"openapi": "3.1.0", "info": info, "paths": paths, "components": components}).encode()


def _operation(route: Route, envs: Sequence[str], tokens: bool) -> dict[str, Any]:
    """OpenAPI's description of a route."""
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": _parameters(route, envs),
        "responses": {**_answer(route), "default": _PROBLEM},
    }
    if route.body is not None:
        content = {"schema": _ref(route.body), "example": EXAMPLES[route.name]}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if tokens and not route.open:
        operation["security"] = [{"token": []}]
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {"204": {"description": "Done"}}
    if route.answer == 101:
        return {"101": {"description": "A WebSocket from here on"}}
    kind, schema = (route.answer, {}) if isinstance(route.answer, str) else ("application/json", _ref(route.answer))
    return {"200": {"description": route.summary, "content": {kind: {"schema": schema}}}}


def _parameters(route: Route, envs: Sequence[str]) -> list[dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {
        "env": {"schema": {"type": "string", "enum": list(envs)}},
        "session": {"schema": {"type": "string"}, "example": _SESSION},
    }
    in_path = [
        {"name": name, "in": "path", "required": True, **schemas[name]} for name in re.findall(r"{(\w+)}", route.path)
    ]
    query = {"properties": {}} if route.query is None else route.query.model_json_schema()
    in_query = [
        {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": field}
        for name, field in query["properties"].items()
    ]
    return in_path + in_query


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
