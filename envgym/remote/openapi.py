"""The OpenAPI document of a server, made of its routes and of the bodies' models."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from envgym.episodes.record import to_record
from envgym.types import Episode, Outcome, Task

from .routes import ROUTES, Route
from .wire import VERSION, ProblemBody

REF = "#/components/schemas/{model}"
STATUSES = {
    400: "The body cannot be read",
    401: "No token, or one that is not known",
    403: "Sent by a web page, or under another machine's name",
    404: "It is not there",
    408: "The body did not arrive in time",
    409: "It contradicts a request before it",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    426: "Asked without an upgrade to a WebSocket",
    422: "The request cannot be carried out as it stands, or the environment raised",
    429: "No room: as many sessions as there may be",
    503: "The server is shutting down",
    504: "The environment did not answer in time",
}
WITH_BODY = (400, 408, 413, 415, 422)

SESSION = "example"
_STEP = {"step_id": 0, "action": {"text": "an answer"}}
_SAME_SESSION = {"session": "$request.body#/session_id"}
EXAMPLES: Mapping[str, Any] = {
    "open": {"session_id": SESSION, "seed": 0},
    "step": _STEP,
    "heartbeat": {"session_ids": [SESSION]},
    "batch": {"requests": [{"op": "step", "session_id": SESSION, **_STEP}]},
    "score_group": {
        "task": {"id": "example"},
        "episodes": [to_record(Episode("e", Task("example"), Outcome.completed(), reward=1.0))],
    },
}
"""Bodies that can be sent as they are, in the order of the routes."""
LINKS: Mapping[str, Any] = {
    "open": {
        "step": {"operationId": "step", "parameters": _SAME_SESSION, "requestBody": _STEP},
        "close": {"operationId": "close", "parameters": _SAME_SESSION},
    }
}
"""What an answer leads on to."""


def document(envs: Sequence[str], *, tokens: bool) -> bytes:
    """The document as JSON, of a server of the environments called `envs`; `tokens`: whether it asks for them."""
    models = {model for route in ROUTES for model in (route.body, route.answer) if isinstance(model, type)}
    wanted: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in models | {ProblemBody}]
    wanted.sort(key=lambda pair: pair[0].__name__)
    _, schemas = models_json_schema(wanted, ref_template=REF)
    schemas["$defs"]["Opening"]["properties"]["env"]["enum"] = ["", *envs]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, envs, tokens)
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if tokens:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    result = {
        "openapi": "3.1.0",
        "info": {"title": "envgym", "version": str(VERSION), "description": "Environments of envgym over HTTP."},
        "paths": paths,
        "components": components,
    }
    return json.dumps(result).encode()


def _operation(route: Route, envs: Sequence[str], tokens: bool) -> dict[str, Any]:
    statuses = set(route.problems) | ({401} if tokens and not route.open else set()) | (set() if tokens else {403})
    if route.body is not None:
        statuses |= set(WITH_BODY)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_path_parameters(route, envs), *_query_parameters(route)],
        "responses": {
            **_answer(route),
            **{str(status): _problem(status) for status in sorted(statuses)},
        },
    }
    if route.body is not None:
        content = {"schema": _ref(route.body), "example": EXAMPLES[route.name]}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    if route.name in LINKS:
        operation["responses"]["200"]["links"] = LINKS[route.name]
    if tokens and not route.open:
        operation["security"] = [{"token": []}]
    return operation


def _answer(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {"204": {"description": "Done"}}
    if route.answer == 101:
        return {"101": {"description": "A WebSocket from here on"}}
    if isinstance(route.answer, str):
        return {"200": {"description": route.summary, "content": {route.answer: {"schema": {}}}}}
    return {"200": {"description": route.summary, "content": {"application/json": {"schema": _ref(route.answer)}}}}


def _problem(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": STATUSES[status],
        "content": {"application/problem+json": {"schema": _ref(ProblemBody)}},
    }
    if status in (429, 503):
        answer["headers"] = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}}}
    if status == 401:
        answer["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return answer


def _path_parameters(route: Route, envs: Sequence[str]) -> list[dict[str, Any]]:
    given: dict[str, dict[str, Any]] = {
        "env": {"schema": {"type": "string", "enum": list(envs)}},
        "session": {"schema": {"type": "string"}, "example": SESSION},
    }
    names = re.findall(r"{(\w+)}", route.path)
    return [{"name": name, "in": "path", "required": True, **given[name]} for name in names]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = route.query.model_json_schema()
    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
        for name, field in schema["properties"].items()
    ]


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": REF.format(model=model.__name__)}
